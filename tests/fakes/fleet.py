"""An in-memory `core.ports.Fleet` of workers that speak `core.messages` and can misbehave.

Everything runs on timers of the event loop, so that it is exact under `tests.fakes.vtime`.
Each message, either way, passes `FakeFleet.tap`, which decides its `Fate`.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

from core.errors import DeadlineExceeded, TriremeError, WorkerLost
from core.ids import Epoch, WorkerId
from core.messages import Call, Event, Fault, Message, Notice, Reply, Role, WorkerInfo
from core.ports import FleetListener, WorkerPort
from tests.fakes.worker import FakeWorker

LATENCY_S = 0.001
DELAY_S = 0.7


class Fate(StrEnum):
    """late: overtaken by what is sent in the next DELAY_S.  kill: its worker dies with it."""

    PASS = "pass"
    DROP = "drop"
    DUPLICATE = "duplicate"
    LATE = "late"
    KILL = "kill"


Tap = Callable[[WorkerId, Message], Fate]


def nth(kind: type, *numbers: int, fate: Fate) -> Tap:
    """That fate for those messages of a kind, counted from 0."""
    seen = count()

    def tap(worker_id: WorkerId, message: Message) -> Fate:
        hit = isinstance(message, kind) and next(seen) in numbers
        return fate if hit else Fate.PASS

    return tap


@dataclass(eq=False)
class FakePort:
    """One session with one incarnation of a worker."""

    info: WorkerInfo
    worker: FakeWorker
    fleet: "FakeFleet"
    lost: bool = False
    pending: set["asyncio.Future[Reply]"] = field(default_factory=set)

    async def call(self, message: Call, timeout_s: float) -> Reply:
        if self.lost:
            raise WorkerLost("no session")
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.pending.add(answer)
        self.fleet.send(self, message, lambda: self._handle(message, answer))
        try:
            async with asyncio.timeout(timeout_s):
                reply = await answer
        except TimeoutError:
            raise DeadlineExceeded(f"no answer to {type(message).__name__}") from None
        finally:
            self.pending.discard(answer)
        if isinstance(reply, Fault):
            raise reply.error()
        return reply

    async def notify(self, message: Notice) -> None:
        if self.lost:
            raise WorkerLost("no session")
        self.fleet.send(self, message, lambda: self.worker.handle(message))

    def _handle(self, message: Call, answer: "asyncio.Future[Reply]") -> None:
        if self.worker.hung:
            return
        try:
            reply = self.worker.handle(message)
        except TriremeError as error:
            reply = Fault.of(error, self.info.worker_id)
        self.fleet.send(self, reply, lambda: answer.done() or answer.set_result(reply))


class FakeFleet:
    """`log` has every message that was sent, dropped ones included."""

    def __init__(self, tap: Tap = lambda worker_id, message: Fate.PASS) -> None:
        self.tap = tap
        self.log: list[tuple[WorkerId, Message]] = []
        self._ports: dict[WorkerId, FakePort] = {}
        self._listeners: list[FleetListener] = []
        self._last_at = 0.0

    # ------------------------------------------------------------------ core.ports.Fleet

    def ports(self) -> Iterator[WorkerPort]:
        return iter(tuple(self._ports.values()))

    def port(self, worker_id: WorkerId) -> WorkerPort | None:
        return self._ports.get(worker_id)

    def listen(self, listener: FleetListener) -> None:
        self._listeners.append(listener)

    # ------------------------------------------------------------------ for tests

    def add(self, name: str, role: Role, epoch: int = 1) -> FakeWorker:
        """A worker joins; its first report follows at once."""
        worker = FakeWorker(WorkerId(name), Epoch(epoch), self.worker, lambda e: None)
        info = WorkerInfo(worker.worker_id, role, worker.epoch, address=name)
        port = FakePort(info, worker, self)
        worker.role = role
        worker.emit = lambda event: self.send(port, event, lambda: self._tell(port, event))
        self._ports[worker.worker_id] = port
        worker.report()
        return worker

    def worker(self, name: str) -> FakeWorker | None:
        port = self._ports.get(WorkerId(name))
        return port.worker if port else None

    def workers(self) -> list[FakeWorker]:
        return [port.worker for port in self._ports.values()]

    def kill(self, name: str, restart_after_s: float | None = None) -> None:
        """The process is gone, with all it held.  A restart is a new epoch."""
        port = self._ports.pop(WorkerId(name), None)
        if port is None:
            return
        port.lost = True
        port.worker.die()
        for answer in port.pending:
            if not answer.done():
                answer.set_exception(WorkerLost(f"{name} died"))
        info = port.info
        for listener in self._listeners:
            listener.on_lost(info.worker_id, info.epoch, "killed")
        if restart_after_s is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(restart_after_s, self.add, name, info.role, info.epoch + 1)

    def send(self, port: FakePort, message: Message, deliver: Callable[[], object]) -> None:
        """Messages that pass keep their order."""
        if port.lost:
            return
        self.log.append((port.info.worker_id, message))
        loop = asyncio.get_running_loop()
        at = self._last_at = max(loop.time() + LATENCY_S, self._last_at + 1e-6)

        def arrive() -> None:
            if not port.lost:
                deliver()

        match self.tap(port.info.worker_id, message):
            case Fate.PASS:
                loop.call_at(at, arrive)
            case Fate.DUPLICATE:
                loop.call_at(at, arrive)
                loop.call_at(at + 2 * LATENCY_S, arrive)
            case Fate.LATE:
                loop.call_at(at + DELAY_S, arrive)
            case Fate.KILL:
                loop.call_soon(lambda: self.kill(port.info.worker_id, restart_after_s=1.0))
            case Fate.DROP:
                pass

    def _tell(self, port: FakePort, event: Event) -> None:
        for listener in self._listeners:
            listener.on_event(port.info.worker_id, event)
