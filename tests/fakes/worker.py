"""A worker as the router sees it: leases, prefill, hand-over and decoding with a toy model.

Holds what it promised until it is done, cancelled, or nobody renewed it for `lease_s`, like
the real one; `held` is empty on an idle worker.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from core.errors import BadRequest, LeaseGone, Refused, Stage, TransferFailed, TriremeError
from core.ids import AttemptKey, Epoch, LeaseId, WorkerId
from core.messages import (
    Accepted,
    Attach,
    AttemptFailed,
    Cancel,
    Event,
    Fault,
    Grant,
    Message,
    Prefill,
    PrefillDone,
    Renew,
    Reply,
    Reserve,
    Role,
    StepEvents,
    TokenEvent,
    WorkerReport,
)
from core.sampling import Sampling
from tests.fakes.model import next_token, told, verdict

BLOCK = 4


class Phase(Enum):
    RESERVED = auto()
    FILLED = auto()
    PREFILLING = auto()
    SENDING = auto()
    DECODING = auto()


@dataclass
class Held:
    """What is filed under one key.  timer: its next action; expiry: when nobody renews it."""

    phase: Phase
    tokens: tuple[int, ...]
    expiry: asyncio.TimerHandle
    emitted: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    grant: Grant | None = None
    timer: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        self.expiry.cancel()
        if self.timer is not None:
            self.timer.cancel()


@dataclass(eq=False)
class FakeWorker:
    """Knobs: *_s are durations, slots the capacity in attempts, refuse how many offers to turn
    down, fail_with what the next prefill fails with, transfer_fails how many transfers fail."""

    worker_id: WorkerId
    epoch: Epoch
    find: Callable[[str], "FakeWorker | None"]
    emit: Callable[[Event], None]
    role: Role = Role.HYBRID
    draining: bool = False
    hung: bool = False
    slots: int = 64
    refuse: int = 0
    retry_after_s: float = 0.0
    fail_with: TriremeError | None = None
    transfer_fails: int = 0
    prefill_s: float = 0.02
    transfer_s: float = 0.01
    step_s: float = 0.01
    lease_s: float = 10.0
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        self.held: dict[AttemptKey, Held] = {}

    def report(self) -> None:
        """Tell the router about this worker."""
        free = self.slots - len(self.held)
        self._emit(WorkerReport(self.worker_id, self.role, self.epoch, self.draining, 64, free))

    def die(self) -> None:
        for held in self.held.values():
            held.stop()
        self.held.clear()
        self.hung = True

    def handle(self, message: Message) -> Reply | None:
        """The reply; None to a notice.  Raises what a Fault would carry."""
        match message:
            case Reserve():
                return self._reserve(message)
            case Prefill():
                self._prefill(message)
            case Attach():
                self._attach(message)
            case Cancel():
                self._drop(message.key)
            case Renew() if not self.hung:
                for key in self.held.keys() & set(message.keys):
                    self.held[key].expiry.cancel()
                    self.held[key].expiry = self._expiry(key)
        return None if isinstance(message, Renew) else Accepted(message.key)

    # ------------------------------------------------------------------ calls

    def _reserve(self, ask: Reserve) -> Grant:
        if ask.key not in self.held:
            self._admit()
            self.held[ask.key] = Held(Phase.RESERVED, ask.tokens, self._expiry(ask.key))
        lease_id = LeaseId(f"{self.worker_id}/{ask.key}")
        blocks = -(-len(ask.tokens) // BLOCK)
        return Grant(ask.key, lease_id, self.epoch, self.worker_id, self.worker_id, blocks, 0)

    def _prefill(self, job: Prefill) -> None:
        if job.key in self.held:
            return
        self._admit()
        held = Held(Phase.PREFILLING, job.tokens, self._expiry(job.key))
        held.emitted, held.sampling, held.grant = job.emitted, job.sampling, job.grant
        self.held[job.key] = held
        self._later(job.key, self.prefill_s, self._prefilled)

    def _attach(self, ask: Attach) -> None:
        held = self.held.get(ask.key)
        if held is not None and held.phase is Phase.DECODING:
            return
        if held is None or held.phase is not Phase.FILLED or ask.epoch != self.epoch:
            raise LeaseGone("no filled lease", stage=Stage.ATTACH)
        held.phase, held.sampling, held.emitted = Phase.DECODING, ask.sampling, ask.emitted
        held.tokens = (*held.tokens, ask.token)
        self._later(ask.key, self.step_s, self._step)

    def _admit(self) -> None:
        if isinstance(self.fail_with, BadRequest):
            raise self.fail_with
        if self.refuse > 0 or self.draining or len(self.held) >= self.slots:
            self.refuse -= 1
            raise Refused("full", retry_after_s=self.retry_after_s)

    # ------------------------------------------------------------------ what happens by itself

    def _prefilled(self, key: AttemptKey, held: Held) -> None:
        if self.fail_with is not None:
            self._give_up(key, self.fail_with)
            self.fail_with = None
            return
        first = self._sample(key, held)
        if held.grant is None or first.finish is not None:
            self._emit(PrefillDone(key, first, self.cached_tokens))
        self._emit(StepEvents((first,)))
        if key in self.held and held.grant is None:
            held.phase = Phase.DECODING
            self._later(key, self.step_s, self._step)
        elif key in self.held:
            held.phase = Phase.SENDING
            self._later(key, self.transfer_s, lambda k, h: self._sent(k, h, first))

    def _sent(self, key: AttemptKey, held: Held, first: TokenEvent) -> None:
        assert held.grant is not None
        peer = self.find(held.grant.worker_id)
        lease = peer.held.get(key) if peer and peer.epoch == held.grant.epoch else None
        if self.transfer_fails > 0 or lease is None or lease.phase is not Phase.RESERVED:
            self.transfer_fails -= 1
            self._give_up(key, TransferFailed("push failed", stage=Stage.TRANSFER))
            return
        assert lease.tokens == held.tokens[:-1]
        lease.phase = Phase.FILLED
        blocks = held.grant.blocks
        self._drop(key)
        moved = {"moved_blocks": blocks, "moved_bytes": blocks * 100, "mover": "memory"}
        self._emit(PrefillDone(key, first, self.cached_tokens, **moved))

    def _step(self, key: AttemptKey, held: Held) -> None:
        self._emit(StepEvents((self._sample(key, held),)))
        if key in self.held:
            self._later(key, self.step_s, self._step)

    def _sample(self, key: AttemptKey, held: Held) -> TokenEvent:
        token = next_token(held.tokens)
        finish = verdict(held.sampling, token, held.emitted)
        logprobs = told(held.sampling, token)
        event = TokenEvent(key, held.emitted, (token,), finish, (logprobs,) if logprobs else ())
        held.tokens, held.emitted = (*held.tokens, token), held.emitted + 1
        if finish is not None:
            self._drop(key)
        return event

    def _give_up(self, key: AttemptKey, error: TriremeError) -> None:
        self._drop(key)
        self._emit(AttemptFailed(key, Fault.of(error, self.worker_id)))

    # ------------------------------------------------------------------ plumbing

    def _later(
        self, key: AttemptKey, delay_s: float, act: Callable[[AttemptKey, Held], None]
    ) -> None:
        held = self.held[key]

        def due() -> None:
            if self.held.get(key) is held and not self.hung:
                act(key, held)

        held.timer = asyncio.get_running_loop().call_later(delay_s, due)

    def _expiry(self, key: AttemptKey) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self.lease_s, self._drop, key)

    def _drop(self, key: AttemptKey) -> None:
        held = self.held.pop(key, None)
        if held is not None:
            held.stop()
            self.report()

    def _emit(self, event: Event) -> None:
        if not self.hung:
            self.emit(event)
