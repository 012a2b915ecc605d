"""The life of every request, from admission to its one end.

    QUEUED ─▶ choose a placement ─▶ offer ─▶ stream ─▶ FINISHED
       ▲            (park when nobody accepts)  │
       └────────── retry.decide ◀──── error ────┘──▶ FAILED

One driver task per request.  Whatever ends an attempt, its holds are released and the workers
that may still hold something for it are told to forget it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import assert_never
from zlib import crc32

from core.clock import Clock
from core.errors import BadRequest, InternalError, Stage, TriremeError, Unavailable
from core.ids import Epoch, RequestId, WorkerId
from core.messages import Event, WorkerReport
from core.ports import Fleet
from core.spec import ClusterSpec
from core.states import RequestEvent
from core.trace import TraceEvent
from router import admission, retry
from router.attempt import Attempt, Seats
from router.chooser import Chooser
from router.counters import Counters, count_one
from router.generation import Life, Running
from router.ledger import Ledger
from router.line import Line
from router.output import Output
from router.plan import Placement
from router.request import Accounting, Generate
from router.table import Table
from router.upkeep import Upkeep

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """waiting: parked requests.  live: requests by state.  in_flight: tokens by worker."""

    waiting: int
    live: Mapping[str, int]
    in_flight: Mapping[WorkerId, int]


class Dispatcher:
    """`router.request.Generator` and `core.ports.FleetListener`.  Lives on one event loop.

    clock stamps traces; deadlines run on the event loop's own clock.
    owner: this router's name, which spreads the first choices of several routers.
    """

    def __init__(self, fleet: Fleet, spec: ClusterSpec, clock: Clock, owner: str) -> None:
        self.counters = Counters()
        self._spec = spec
        self._clock = clock
        self._owner = owner
        self._tickets = count()
        self._ledger = Ledger()
        self._chooser = Chooser(
            fleet, self._ledger, spec.router.disagg_min_tokens, first_turn=crc32(owner.encode())
        )
        self._line = Line()
        self._table = Table(self.counters)
        self._upkeep = Upkeep(self._table, spec.timeouts, self.counters)
        self._lives: dict[RequestId, tuple[Life, asyncio.Task[None]]] = {}
        self._closed = False
        fleet.listen(self)

    # ------------------------------------------------------------------ for the edge

    async def generate(self, request: Generate) -> Running:
        """Raises Overloaded, Unavailable or BadRequest (the id is in use) at once."""
        self._admit(request)
        accounting = Accounting(prompt_tokens=len(request.tokens))
        output = Output(request.sampling)
        life = Life(request, next(self._tickets), self._clock, accounting, output)
        life.mark(TraceEvent.RECEIVED)
        life.move(RequestEvent.ADMIT)
        self._upkeep.start()
        driver = asyncio.create_task(self._serve(life), name=f"{self._owner}-{request.request_id}")
        self._lives[request.request_id] = life, driver
        driver.add_done_callback(lambda done: self._ended(life, done))
        return Running(life, driver, self._spec.timeouts.call_s)

    def snapshot(self) -> Snapshot:
        live = Counter(str(life.state) for life, _ in self._lives.values())
        return Snapshot(len(self._line), dict(live), self._ledger.snapshot())

    async def close(self) -> None:
        """End every request with Unavailable and every task of this dispatcher."""
        self._closed = True
        drivers = [driver for _, driver in self._lives.values()]
        for driver in drivers:
            driver.cancel()
        if drivers:
            await asyncio.wait(drivers, timeout=self._spec.timeouts.call_s)
        await self._upkeep.close()

    # ------------------------------------------------------------------ for the fleet

    def on_event(self, worker_id: WorkerId, event: Event) -> None:
        if not isinstance(event, WorkerReport):
            self._table.route(worker_id, event)
            return
        self._line.changed(None if self._chooser.learn(event) else worker_id)

    def on_lost(self, worker_id: WorkerId, epoch: Epoch, reason: str) -> None:
        self._chooser.forget(worker_id, epoch)
        self._table.lost(worker_id, epoch, reason)
        self._line.changed()

    # ------------------------------------------------------------------ one request

    async def _serve(self, life: Life) -> None:
        """The driver: one attempt per round.  Raises the error that ends the request."""
        life.deadline = self._queue_deadline()
        while life.output.finish is None:
            placement, seats = await self._place(life)
            with self._attempt(life, seats) as attempt:
                try:
                    await attempt.offer()
                    self._accepted(life, placement, seats)
                    await attempt.stream()
                except TriremeError as error:
                    if life.output.finish is None:
                        self._judge(life, placement, attempt, error)

    async def _place(self, life: Life) -> tuple[Placement, Seats]:
        """Choose where to try next; wait in line while nobody can.  Raises at the deadline."""
        # The last attempt's cancels leave first: a worker gets its blocks back before it is asked.
        await asyncio.sleep(0)
        while not (self._line.may_try(life.ticket) and (found := self._chooser.choose(life))):
            if life.ticket not in self._line:
                self._park(life)
            left = life.deadline - asyncio.get_running_loop().time()
            if left <= 0:
                limit = self._spec.timeouts.queue_s
                raise admission.expired(self._chooser.ready(), limit, life.last_refusal)
            hint = min(life.refused.values(), default=self._spec.timeouts.call_s)
            await self._line.wait(life.ticket, min(left, hint))
            life.refused.clear()
        life.move(RequestEvent.PLACE)
        life.mark(TraceEvent.PLACED)
        return found

    @contextmanager
    def _attempt(self, life: Life, seats: Seats) -> Iterator[Attempt]:
        """An attempt that receives events; on every way out all it had is given back."""
        life.tries += 1
        life.accounting.attempts += 1
        attempt = Attempt(life, seats, self._ledger, self._spec.timeouts)
        self._table.add(attempt)
        try:
            yield attempt
        finally:
            self._table.remove(attempt)
            attempt.release()
            self._upkeep.cancel(attempt.key, attempt.legs.values())

    def _accepted(self, life: Life, placement: Placement, seats: Seats) -> None:
        self._line.leave(life.ticket)
        life.refused.clear()
        life.recompute_on = None
        life.accounting.prefill_worker = placement.prefill
        life.accounting.decode_worker = placement.decode
        for info in (seats.prefill.info, seats.decode.info):
            if info.lossy and info.lossy not in life.accounting.lossy:
                life.accounting.lossy.append(info.lossy)
        if placement.degraded:
            self._degrade(life, placement.degraded)

    def _judge(
        self, life: Life, placement: Placement, attempt: Attempt, error: TriremeError
    ) -> None:
        """Prepare the next round, or raise the error that ends the request."""
        attempts = life.accounting.attempts
        ended = retry.Ended(error, placement, attempt.accepted, attempts)
        verdict = retry.decide(ended, self._spec.router.max_attempts)
        match verdict:
            case retry.Fail():
                raise error
            case retry.Next():
                life.accounting.attempts -= 1
                life.refused[verdict.worker] = error.retry_after_s or self._spec.timeouts.call_s
                life.last_refusal = error.message
                self.counters.refusals += 1
            case retry.Again():
                self._retrying(life, error)
                life.recompute_on = None
                if verdict.avoid is not None:
                    life.avoid.add(verdict.avoid)
            case retry.Recompute():
                self._retrying(life, error)
                life.recompute_on = verdict.worker
            case _:
                assert_never(verdict)
        life.move(RequestEvent.RETRY)
        life.mark(TraceEvent.RETRIED)

    def _retrying(self, life: Life, error: TriremeError) -> None:
        life.deadline = self._queue_deadline()
        count_one(self.counters.retries, str(error.stage))
        self._degrade(life, f"retried:{error.stage}")
        log.warning("%s: attempt %d failed: %s", life.request.request_id, life.tries, error)

    def _degrade(self, life: Life, kind: str) -> None:
        life.accounting.degraded.append(kind)
        count_one(self.counters.degraded, kind)

    def _ended(self, life: Life, driver: "asyncio.Task[None]") -> None:
        """The driver is over: the one place where a request ends."""
        del self._lives[life.request.request_id]
        error: TriremeError | None = None
        if driver.cancelled():
            outcome, event = "cancelled", RequestEvent.CANCEL
            if self._closed:
                error = Unavailable("the router is shutting down; retry", stage=Stage.EDGE)
        elif (raised := driver.exception()) is not None:
            error = _typed(life, raised)
            outcome, event = error.code, RequestEvent.FAIL
            log.warning("%s failed: %s", life.request.request_id, error)
        else:
            outcome, event = "finished", RequestEvent.FINISH
        count_one(self.counters.requests, outcome)
        life.end(event, error)
        self._line.leave(life.ticket)
        self._line.changed()

    # ------------------------------------------------------------------ admission

    def _admit(self, request: Generate) -> None:
        error: TriremeError | None
        if self._closed:
            error = Unavailable("the router is shutting down; retry", stage=Stage.EDGE)
        elif request.request_id in self._lives:
            message = f"request id {request.request_id} is in use; choose another"
            error = BadRequest(message, field="request_id")
        else:
            limit = self._spec.router.max_waiting
            error = admission.admit(self._chooser.ready(), len(self._line), limit)
        if error is not None:
            count_one(self.counters.requests, error.code)
            raise error

    def _park(self, life: Life) -> None:
        """Only a request that never ran can be turned away: others were let in before."""
        error = admission.park(len(self._line), self._spec.router.max_waiting)
        if error is not None and not life.accounting.attempts:
            raise error
        self._line.join(life.ticket, life.refused)

    def _queue_deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._spec.timeouts.queue_s


def _typed(life: Life, raised: BaseException) -> TriremeError:
    if isinstance(raised, TriremeError):
        return raised
    log.error("%s: the router broke", life.request.request_id, exc_info=raised)
    return InternalError(
        f"the router broke on this request ({type(raised).__name__}: {raised}); report this"
    )
