"""A dispatcher over a fake fleet in virtual time, and what must hold when all is over."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from core.errors import TriremeError
from core.ids import RequestId
from core.messages import Cancel, Role
from core.sampling import Sampling
from core.spec import ClusterSpec
from router.dispatch import Dispatcher
from router.generation import Running
from router.request import Accounting, Generate
from tests.fakes import vtime
from tests.fakes.fleet import FakeFleet, Fate, Tap
from tests.fakes.model import plain, told
from tests.fakes.worker import FakeWorker

PROMPT = tuple(range(5, 15))


@dataclass
class Result:
    """How a generation ended.  Exactly one of error, cancelled or accounting.finish is set."""

    tokens: list[int] = field(default_factory=list)
    accounting: Accounting | None = None
    error: TriremeError | None = None
    cancelled: bool = False


@dataclass
class Rig:
    fleet: FakeFleet
    dispatcher: Dispatcher

    def start(self, request: Generate) -> "asyncio.Task[Result]":
        return asyncio.create_task(self.consume(request))

    async def consume(self, request: Generate) -> Result:
        """Play a client to the end."""
        result = Result()
        try:
            generation = await self.dispatcher.generate(request)
            result.accounting = generation.accounting
            async for tokens in generation:
                assert tokens
                assert [t.logprobs for t in tokens] == [
                    told(request.sampling, t.id) for t in tokens
                ]
                result.tokens += (token.id for token in tokens)
            await assert_over(generation)
        except TriremeError as error:
            result.error = error
        except asyncio.CancelledError:
            result.cancelled = True
        return result

    def worker(self, name: str) -> FakeWorker:
        found = self.fleet.worker(name)
        assert found is not None
        return found

    def sent(self, kind: type) -> list[tuple[str, Any]]:
        return [(worker, m) for worker, m in self.fleet.log if isinstance(m, kind)]

    def cancelled_on(self) -> set[str]:
        return {worker for worker, _ in self.sent(Cancel)}

    async def assert_released(self, within_s: float = 25.0) -> None:
        """Nothing is held anywhere: not by workers, not in the ledger, not by tasks."""
        await asyncio.sleep(within_s)
        held = {w.worker_id: list(w.held) for w in self.fleet.workers() if w.held}
        assert held == {}
        snapshot = self.dispatcher.snapshot()
        assert (snapshot.waiting, dict(snapshot.live), snapshot.in_flight) == (0, {}, {})
        await self.dispatcher.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def assert_over(generation: Running) -> None:
    """The end comes once and stays."""
    try:
        more = await anext(generation)
    except StopAsyncIteration:
        return
    raise AssertionError(f"{more} after the end")


def request(name: str = "r", prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> Generate:
    """A request for 8 tokens that ignores eos, unless told otherwise."""
    settings = {"max_tokens": 8, "ignore_eos": True} | sampling
    return Generate(RequestId(name), prompt, Sampling(**settings))


def expected(ask: Generate) -> list[int]:
    return list(plain(ask.tokens, ask.sampling)[0])


def assert_whole(result: Result, ask: Generate, attempts: int, *degraded: str) -> None:
    """It finished with the plain loop's tokens, after that many attempts."""
    assert result.error is None
    assert result.accounting is not None
    assert result.tokens == expected(ask)
    assert result.accounting.completion_tokens == len(result.tokens)
    assert result.accounting.attempts == attempts
    assert result.accounting.degraded == list(degraded)


def passing(worker_id: str, message: object) -> Fate:
    return Fate.PASS


@asynccontextmanager
async def rig(
    workers: str = "p d", tap: Tap = passing, *, router: Any = None, timeouts: Any = None
) -> AsyncIterator[Rig]:
    """workers: names; the first letter is the role (p, d, h).  Ends by checking for leaks."""
    default = ClusterSpec()
    spec = replace(
        default,
        router=replace(default.router, **(router or {})),
        timeouts=replace(default.timeouts, **(timeouts or {})),
    )
    fleet = FakeFleet(tap)
    dispatcher = Dispatcher(fleet, spec, vtime.now, "router")
    roles = {"p": Role.PREFILL, "d": Role.DECODE, "h": Role.HYBRID}
    for name in workers.split():
        fleet.add(name, roles[name[0]])
    await asyncio.sleep(0.01)
    made = Rig(fleet, dispatcher)
    yield made
    await made.assert_released()
