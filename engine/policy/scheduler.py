"""The heart of a worker: one object that decides, never waits, and is told the time.

    reserve, prefill, attach, cancel, renew, moved, landing_*  ─▶ ┌───────────┐ ─▶ plan ─▶ runner
              (sessions and movers, between two steps at most)    │ Scheduler │
    StepOutput ◀──────────────────────────────────────────────────└───────────┘ ◀─ commit ◀─┘

Not thread-safe: the engine calls it under its one mutex, which it does not hold while the
runner executes a plan.  Hence calls come between `plan` and `commit` too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from core.errors import DeadlineExceeded, InternalError, LeaseGone, Stage, TriremeError
from core.ids import AttemptKey, BlockId, Epoch, LeaseId
from core.messages import (
    Attach,
    AttemptFailed,
    Event,
    Fault,
    Grant,
    Prefill,
    Reserve,
    WorkerReport,
)
from core.ports import StepOutput
from core.states import SequenceState
from engine.policy.admission import Admission
from engine.policy.blocks import Generations
from engine.policy.chain import PrefixChain
from engine.policy.config import SchedulerConfig
from engine.policy.grammars import GrammarPort, GrammarWatch, NoGrammars
from engine.policy.holdings import Holdings
from engine.policy.plan import Plan, Sampled
from engine.policy.record import StepRecorder
from engine.policy.sequence import Sequence as Seq
from engine.policy.step import StepPlanner
from engine.policy.stop import StopRules

_STEP_WEIGHT = 0.2
"""Weight of the newest step in the moving average of step times."""

_STAGE = {
    SequenceState.WAITING: Stage.QUEUE,
    SequenceState.PREFILLING: Stage.PREFILL,
    SequenceState.HANDOFF: Stage.TRANSFER,
    SequenceState.RUNNING: Stage.DECODE,
}


class Scheduler:
    """Prefill, decode and hand-over of one worker.  `now` is in seconds on one monotonic clock.

    A key names one thing at a time: a queued or running sequence, a lease, or lent blocks.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        generations: Generations | None = None,
        grammars: GrammarPort | None = None,
    ) -> None:
        """grammars: None serves none."""
        self._config = config
        self._held = held = Holdings.empty(config, generations)
        self._admission = Admission(held)
        self._steps = StepPlanner(held)
        self._grammars = GrammarWatch(held, grammars or NoGrammars())
        self._recorder = StepRecorder(held, StopRules(config.eos_ids, config.max_len))
        self._plan: Plan | None = None
        self._planned_at = 0.0
        self._step_s = 0.0

    # ----------------------------------------------------------------- calls that bring work

    def reserve(self, ask: Reserve, owner: str, now: float) -> Grant:
        """Lease blocks for the KV of `ask.tokens`.  Raises Refused or BadRequest."""
        self._admission.check_reserve(ask)
        config, held = self._config, self._held
        chain = self._chain(ask.salt)
        blocks = config.blocks_for(len(ask.tokens))
        promised = self._admission.promised_blocks()
        hashes = chain.first(len(ask.tokens) // config.block_size, ask.tokens)
        claim = held.pool.claim(hashes, blocks, headroom=promised + 1)
        if claim is None:
            raise self._admission.refusal(
                Stage.RESERVE,
                f"no room for {blocks} blocks: {held.pool.free} are free, "
                f"{promised} of them promised",
            )
        lease = held.leases.open(ask, owner, chain, claim, now)
        return Grant(
            key=ask.key,
            lease_id=lease.lease_id,
            epoch=config.epoch,
            worker_id=config.worker_id,
            address=config.address,
            blocks=blocks,
            present_blocks=claim.present,
        )

    def prefill(self, job: Prefill, owner: str, now: float) -> None:
        """Queue the job.  Raises Refused, BadRequest or Incompatible."""
        self._admission.check_prefill(job)
        self._held.roster.add(
            Seq(
                key=job.key,
                owner=owner,
                tokens=list(job.tokens),
                emitted=job.emitted,
                sampling=job.sampling,
                chain=self._chain(job.salt),
                arrival=now,
                deadline=now + self._config.lease_s,
                grant=job.grant,
                sent=job.grant.present_blocks if job.grant else 0,
            )
        )

    def attach(self, job: Attach, owner: str, now: float) -> None:
        """Decode on from a filled lease.  Raises LeaseGone or BadRequest."""
        self._admission.check_attach(job)
        lease = self._held.leases.commit(job.lease_id, job.epoch, job.key)
        seq = Seq(
            key=job.key,
            owner=owner,
            tokens=[*lease.ask.tokens, job.token],
            emitted=job.emitted,
            sampling=job.sampling,
            chain=lease.chain,
            arrival=now,
            deadline=now + self._config.lease_s,
            state=SequenceState.RUNNING,
            block_ids=list(lease.claim.block_ids),
            computed=len(lease.ask.tokens),
            published=lease.claim.present,
            started_at=now,
            first_token_at=now,
        )
        self._held.roster.add(seq)
        self._held.roster.publish(seq)

    # ------------------------------------------------------------------ calls that end or keep

    def cancel(self, key: AttemptKey, owner: str | None = None) -> bool:
        """Forget `key`; False when there was nothing, or nothing of this owner's (None: anyone's).
        No event for it after this.

        Blocks that a step, a mover or a landing write still uses come back when that is over.
        """
        found = self._drop(key, owner)
        self._held.totals.cancelled += found
        return found

    def drop_owner(self, owner: str) -> int:
        """Cancel everything that came by this session; how many attempts that was."""
        keys = [s.key for s in self._held.roster if s.owner == owner]
        keys += [x.ask.key for x in self._held.leases if x.owner == owner]
        return sum(self.cancel(key) for key in keys)

    def renew(self, keys: Iterable[AttemptKey], owner: str, now: float) -> None:
        """The owner still wants these; other people's and unknown ones are passed over."""
        for key in keys:
            seq = self._held.roster.get(key)
            if seq is not None and seq.owner == owner:
                seq.deadline = now + self._config.lease_s
            self._held.leases.renew(key, owner, now)

    def expire(self, now: float) -> StepOutput:
        """Drop what nobody renewed for `lease_s` or whose grammar cannot be had, and tell the
        owners."""
        held = self._held
        events: list[tuple[str, Event]] = [*self._grammars.end_hopeless()]
        for seq in [s for s in held.roster if s.deadline < now]:
            error: TriremeError = DeadlineExceeded(
                f"nobody renewed this attempt for {self._config.lease_s} s; start another",
                stage=_STAGE[seq.state],
            )
            events.append((seq.owner, self._failed(seq.key, error)))
            held.roster.end(seq)
            held.totals.expired += 1
        for lease in held.leases.overdue(now):
            error = LeaseGone(
                f"lease {lease.lease_id} was not renewed for {self._config.lease_s} s; "
                "reserve again",
                stage=Stage.RESERVE,
            )
            events.append((lease.owner, self._failed(lease.ask.key, error)))
            held.leases.end(lease)
            held.totals.leases_expired += 1
        return StepOutput(events=tuple(events))

    def drain(self) -> None:
        """Refuse new work; what runs goes on, and granted leases may be attached to."""
        self._admission.draining = True

    # ------------------------------------------------------------------------------ hand-over

    def moved(self, key: AttemptKey, block_ids: Iterable[BlockId], last: bool) -> None:
        """The mover is done with these lent blocks; with `last`, with the attempt."""
        self._held.lending.take_back(key, block_ids)
        seq = self._held.roster.get(key)
        if last and seq is not None and not seq.local:
            self._held.roster.end(seq)

    def landing_begin(
        self, lease_id: LeaseId, epoch: Epoch, first_index: int, count: int, now: float
    ) -> tuple[BlockId, ...]:
        """See `LeaseTable.begin`.  Raises LeaseGone."""
        return self._held.leases.begin(lease_id, epoch, first_index, count, now)

    def landing_end(
        self, lease_id: LeaseId, first_index: int, count: int, ok: bool, now: float
    ) -> None:
        """See `LeaseTable.end_write`."""
        self._held.leases.end_write(lease_id, first_index, count, ok, now)

    def abort_lease(self, key: AttemptKey, lease_id: LeaseId) -> bool:
        """The sender gave up on this lease; False when it had ended already."""
        lease = self._held.leases.get(key)
        if lease is None or lease.lease_id != lease_id:
            return False
        self._held.leases.end(lease)
        self._held.totals.leases_aborted += 1
        return True

    # ---------------------------------------------------------------------------------- steps

    def plan(self, now: float) -> Plan:
        """The next step, composed as `config.policy` says.  An empty plan needs no `commit`.
        Raises InternalError while a plan is out."""
        if self._plan is not None:
            raise InternalError("a step is planned while the one before is not committed")
        self._grammars.look(now)
        plan = Plan(tuple(self._steps.plan(now)))
        if plan.works:
            self._held.roster.take_off(plan.works)
            self._plan, self._planned_at = plan, now
        return plan

    def commit(self, plan: Plan, sampled: Sequence[Sampled | None], now: float) -> StepOutput:
        """The runner executed `plan`; `sampled[i]` is the outcome of `plan.works[i]`, None where it
        asks for none.  Raises InternalError if it is not the plan that is out."""
        if not plan.works:
            return StepOutput()
        self._close(plan, now)
        return self._recorder.record(plan, sampled, now)

    def abandon(self, plan: Plan, fault: Fault, now: float) -> StepOutput:
        """The runner failed on `plan`: its sequences fail, everything else goes on.  Raises
        InternalError if it is not the plan that is out."""
        self._close(plan, now)
        fault = replace(fault, worker=fault.worker or self._config.worker_id)
        failed = [s for s in self._held.roster.land() if s.state is not SequenceState.DONE]
        for seq in failed:
            self._held.roster.end(seq)
        self._held.totals.failed += len(failed)
        return StepOutput(events=tuple((s.owner, AttemptFailed(s.key, fault)) for s in failed))

    def holds(self, key: AttemptKey) -> bool:
        """The attempt is live here: neither ended nor cancelled."""
        return key in self._held.roster or key in self._held.leases

    def report(self, now: float) -> WorkerReport:
        """State at `now`; a step under way counts as soon as it has taken longer than usual,
        so that a stuck device shows."""
        step_s = max(self._step_s, now - self._planned_at) if self._plan else self._step_s
        return self._held.report(self._admission.draining, step_s)

    def check_integrity(self) -> None:
        """Raises InternalError saying which block or reference is not accounted for."""
        self._held.check_integrity()

    # ------------------------------------------------------------------------------- internal

    def _close(self, plan: Plan, now: float) -> None:
        if plan is not self._plan:
            raise InternalError("this plan is not the one under way")
        self._plan = None
        took = now - self._planned_at
        old = self._step_s or took
        self._step_s = old + _STEP_WEIGHT * (took - old)
        self._held.totals.steps += 1

    def _chain(self, salt: str) -> PrefixChain:
        return PrefixChain(self._config.scope(salt).seed(), self._config.block_size)

    def _drop(self, key: AttemptKey, owner: str | None) -> bool:
        seq, lease = self._held.roster.get(key), self._held.leases.get(key)
        ends_seq = seq is not None and owner in (None, seq.owner)
        ends_lease = lease is not None and owner in (None, lease.owner)
        if seq is not None and ends_seq:
            self._held.roster.end(seq)
        if lease is not None and ends_lease:
            self._held.leases.end(lease)
        return ends_seq or ends_lease

    def _failed(self, key: AttemptKey, error: TriremeError) -> AttemptFailed:
        return AttemptFailed(key, Fault.of(error, self._config.worker_id))
