"""A worker without an engine, and the messages to speak to it.  Run as a script it is a process
of its own, `python session_peer.py serve | client ADDRESS`; the first line it prints says it is up.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from core.errors import BY_CODE, Stage
from core.ids import AttemptKey
from core.kvlayout import Compatibility, KVLayout
from core.messages import (
    WIRE_VERSION,
    Accepted,
    Attach,
    AttemptFailed,
    Cancel,
    DataEndpoint,
    Fault,
    FinishReason,
    Grant,
    Hello,
    HostFacts,
    Prefill,
    PrefillDone,
    Reserve,
    Role,
    StepEvents,
    TokenEvent,
    Welcome,
    WorkerInfo,
    WorkerReport,
)
from core.sampling import Sampling
from core.spec import FaultSpec
from transport.faulty import FaultInjector
from transport.session_client import ClientSession
from transport.session_server import ServerSession, SessionServer
from transport.wire import SessionLimits

KEY = AttemptKey("request", 1)
COMPAT = Compatibility(WIRE_VERSION, "digest", "float32", KVLayout(2, 1, 16, 8, "float32"))
HELLO = Hello(WIRE_VERSION, "router", 0, COMPAT, HostFacts("boot", 0, 1))
WELCOME = Welcome(
    WorkerInfo("worker-0", Role.DECODE, 7, "127.0.0.1:1"),
    COMPAT,
    HostFacts("boot", 0, 2),
    (DataEndpoint("tcp", "127.0.0.1:2"),),
    b"k" * 32,
)
GRANT = Grant(KEY, "lease", 7, "worker-0", "127.0.0.1:1", 2, 1)
EVENT = TokenEvent(KEY, 0, (3,), FinishReason.STOP)
EVENTS = (
    StepEvents((EVENT,)),
    PrefillDone(KEY, EVENT, 0),
    AttemptFailed(KEY, Fault("lease_gone", "expired", Stage.ATTACH, "worker-0")),
    WorkerReport("worker-0", Role.DECODE, 7),
)
CALL_S = 5.0


def ask(order: str = "", request: str = "request") -> Reserve:
    """A call that tells the worker below how to behave."""
    return Reserve(AttemptKey(request, 1), (1, 2, 3), order)


CALLS = (
    ask(),
    Prefill(KEY, (1, 2), Sampling(), grant=GRANT),
    Attach(KEY, "lease", 7, 3, 1, Sampling()),
    Cancel(KEY),
)


class Worker:
    """Answers at once; a Reserve's salt orders otherwise: "wait S", "block S", "raise CODE",
    "crash", "unsendable", "events".  Remembers everything."""

    def __init__(self) -> None:
        self.sessions: list[ServerSession] = []
        self.closed: list[str] = []
        self.calls: list[Any] = []
        self.notices: list[Any] = []
        self.refusal: Exception | None = None

    def welcome(self, hello: Hello, session: ServerSession) -> Welcome:
        if self.refusal:
            raise self.refusal
        self.sessions.append(session)
        return WELCOME

    async def on_call(self, session: ServerSession, call: Any) -> Any:
        self.calls.append(call)
        if not isinstance(call, Reserve):
            return Accepted(call.key)
        match call.salt.split():
            case ["wait", seconds]:
                await asyncio.sleep(float(seconds))
            case ["block", seconds]:
                time.sleep(float(seconds))
            case ["raise", code]:
                raise BY_CODE[code](
                    "no", stage=Stage.RESERVE, worker="w", retry_after_s=1.5, field="f"
                )
            case ["crash"]:
                raise ZeroDivisionError("a bug in the handler")
            case ["unsendable"]:
                return replace(GRANT, blocks="two")
            case ["events"]:
                for event in EVENTS:
                    session.send(event)
        return replace(GRANT, key=call.key)

    def on_notice(self, session: ServerSession, notice: Any) -> None:
        self.notices.append(notice)

    def on_close(self, session: ServerSession) -> None:
        self.closed.append(session.owner)


class Client:
    """A session with what it was told."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.losses: list[str] = []
        self.session: ClientSession

    async def connect(
        self, address: str, hello: Hello = HELLO, faults: Any = None, connect_s: float = CALL_S
    ) -> ClientSession:
        self.session = await ClientSession.connect(
            address, hello, self.events.append, self.losses.append, connect_s, faults
        )
        return self.session


class Pair:
    """A served worker; its clients are closed with it."""

    def __init__(self, worker: Worker, server: SessionServer, address: str) -> None:
        self.worker, self.server, self.address = worker, server, address
        self.clients: list[Client] = []

    async def client(self, **options: Any) -> Client:
        client = Client()
        await client.connect(self.address, **options)
        self.clients.append(client)
        return client


@asynccontextmanager
async def served(
    worker: Any = None, faults: FaultInjector | None = None, limits: SessionLimits | None = None
) -> AsyncIterator[Pair]:
    worker = worker or Worker()
    server = SessionServer(worker, "127.0.0.1", 0, faults, limits)
    pair = Pair(worker, server, await server.start())
    try:
        yield pair
    finally:
        for client in pair.clients:
            await client.session.close()
        await server.stop(1.0)


def run(scenario: Coroutine[Any, Any, None], limit_s: float = 60.0) -> None:
    """Run an async test; nothing in it may hang."""

    async def limited() -> None:
        async with asyncio.timeout(limit_s):
            await scenario

    asyncio.run(limited())


async def eventually(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


# ---------------------------------------------------------------------------- as a process


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[Any]:
    """A peer process and the first line it printed; killed at the end, whatever happened."""
    command = [sys.executable, str(Path(__file__)), *arguments]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        command, cwd=root, env={"PYTHONPATH": str(root)}, stdout=subprocess.PIPE, text=True
    ) as peer:
        try:
            assert peer.stdout is not None
            yield peer, (await asyncio.to_thread(peer.stdout.readline)).strip()
        finally:
            peer.kill()


async def _serve(kill_on: Sequence[str]) -> None:
    rules = [FaultSpec(on=name, action="kill") for name in kill_on]
    server = SessionServer(Worker(), "127.0.0.1", 0, FaultInjector(rules))
    print(await server.start(), flush=True)
    await asyncio.sleep(60)


async def _client(address: str) -> None:
    await Client().connect(address)
    print("connected", flush=True)
    await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(_client(sys.argv[2]) if sys.argv[1] == "client" else _serve(sys.argv[2:]))
