"""The engine: one thread runs `plan → run → commit`; everybody else calls in under one lock.

The scheduler is plain single-threaded bookkeeping; this file gives it a thread, a clock and a
runner.  The lock is held for `plan`, `commit` and calls from sessions, never while the model
runs, so a call waits for microseconds and not for a step.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from core.clock import Clock
from core.errors import InternalError, Stage
from core.ids import AttemptKey, BlockId, Epoch, LeaseId
from core.kvlayout import KVLayout
from core.messages import Attach, Fault, Grant, Prefill, Reserve, WorkerReport
from core.ports import StepOutput
from engine.policy.plan import Plan, Sampled
from engine.policy.scheduler import Scheduler

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.1
_MAX_CONSECUTIVE_FAILURES = 3


class StepRunner(Protocol):
    """Executes a plan on a device; the answer is aligned with `plan.works`."""

    def run(self, plan: Plan) -> list[Sampled | None]: ...


class EngineLanding:
    """`core.ports.Landing` over the scheduler's leases."""

    def __init__(self, scheduler: Scheduler, lock: threading.Condition, clock: Clock) -> None:
        self._scheduler = scheduler
        self._lock = lock
        self._clock = clock

    def begin(
        self, lease_id: LeaseId, epoch: Epoch, first_index: int, count: int
    ) -> tuple[BlockId, ...]:
        with self._lock:
            return self._scheduler.landing_begin(lease_id, epoch, first_index, count, self._clock())

    def end(self, lease_id: LeaseId, first_index: int, count: int, ok: bool) -> None:
        with self._lock:
            self._scheduler.landing_end(lease_id, first_index, count, ok, self._clock())


class Engine:
    """`core.ports.EnginePort` over a scheduler and a runner."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        layout: KVLayout,
        clock: Clock,
        sink: Callable[[StepOutput], None],
    ) -> None:
        self.layout = layout
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._sink = sink
        self._wake = threading.Condition()
        self._stopping = False
        self._failures = 0
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self.landing = EngineLanding(scheduler, self._wake, clock)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Stop after the current step; False when the step outlasted `timeout_s`."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def reserve(self, ask: Reserve, owner: str) -> Grant:
        with self._wake:
            return self._scheduler.reserve(ask, owner, self._clock())

    def prefill(self, job: Prefill, owner: str) -> None:
        with self._wake:
            self._scheduler.prefill(job, owner, self._clock())
            self._wake.notify()

    def attach(self, job: Attach, owner: str) -> None:
        with self._wake:
            self._scheduler.attach(job, owner, self._clock())
            self._wake.notify()

    def cancel(self, key: AttemptKey, owner: str | None = None) -> bool:
        with self._wake:
            return self._scheduler.cancel(key, owner)

    def abort_lease(self, key: AttemptKey, lease_id: LeaseId) -> bool:
        with self._wake:
            return self._scheduler.abort_lease(key, lease_id)

    def renew(self, keys: Sequence[AttemptKey], owner: str) -> None:
        with self._wake:
            self._scheduler.renew(keys, owner, self._clock())

    def drop_owner(self, owner: str) -> int:
        with self._wake:
            return self._scheduler.drop_owner(owner)

    def moved(self, key: AttemptKey, block_ids: Sequence[BlockId], last: bool) -> None:
        with self._wake:
            self._scheduler.moved(key, block_ids, last)
            self._wake.notify()

    def holds(self, key: AttemptKey) -> bool:
        with self._wake:
            return self._scheduler.holds(key)

    def drain(self) -> None:
        with self._wake:
            self._scheduler.drain()

    def wake(self) -> None:
        """Plan again at once: what sequences wait for has changed."""
        with self._wake:
            self._wake.notify()

    def report(self) -> WorkerReport:
        with self._wake:
            return self._scheduler.report(self._clock())

    def check_integrity(self) -> None:
        """Raises InternalError saying which bookkeeping rule is broken."""
        with self._wake:
            self._scheduler.check_integrity()

    def _loop(self) -> None:
        while (plan := self._next_plan()) is not None:
            self._sink(self._step(plan))

    def _next_plan(self) -> Plan | None:
        """Wait for something to do.  None: stop.  An empty plan carries expiries only."""
        with self._wake:
            plan = self._scheduler.plan(self._clock())
            if not plan.works and not self._stopping:
                self._wake.wait(_IDLE_WAIT_S)
                plan = self._scheduler.plan(self._clock())
            return None if self._stopping else plan

    def _step(self, plan: Plan) -> StepOutput:
        fault: Fault | None = None
        sampled: list[Sampled | None] = []
        try:
            sampled = self._runner.run(plan) if plan.works else []
            self._failures = 0
        except (RuntimeError, ValueError, IndexError, TypeError) as e:
            fault = self._step_failed(plan, e)
        with self._wake:
            now = self._clock()
            if fault is not None:
                return self._scheduler.abandon(plan, fault, now)
            done = self._scheduler.commit(plan, sampled, now)
            expired = self._scheduler.expire(now)
            return StepOutput(done.events + expired.events, done.ready + expired.ready)

    def _step_failed(self, plan: Plan, cause: Exception) -> Fault:
        """One bad batch fails its own requests; a device that keeps failing ends the worker."""
        self._failures += 1
        log.error("step of %d sequences failed", len(plan.works), exc_info=cause)
        if self._failures >= _MAX_CONSECUTIVE_FAILURES:
            raise cause
        error = InternalError(
            f"the model step failed: {cause}; see the worker's log", stage=Stage.DECODE
        )
        return Fault.of(error)
