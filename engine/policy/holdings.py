"""Everything one worker holds, in one place: what is counted, reported and audited together."""

from collections import Counter
from dataclasses import dataclass

from core.errors import InternalError
from core.ids import AttemptKey
from core.messages import WorkerReport
from core.states import SequenceState
from engine.policy.blocks import BlockPool, Generations
from engine.policy.config import SchedulerConfig
from engine.policy.leases import LeaseTable
from engine.policy.lending import Lending
from engine.policy.roster import Roster
from engine.policy.totals import Totals

_S = SequenceState


@dataclass(frozen=True, slots=True)
class Holdings:
    """The owners of blocks of one scheduler, each the only one to change what it owns."""

    config: SchedulerConfig
    pool: BlockPool
    roster: Roster
    leases: LeaseTable
    lending: Lending
    totals: Totals

    @staticmethod
    def empty(config: SchedulerConfig, generations: Generations | None) -> "Holdings":
        pool, totals = BlockPool(config.total_blocks, generations), Totals()
        return Holdings(
            config=config,
            pool=pool,
            roster=Roster(pool, config.block_size),
            leases=LeaseTable(pool, config.epoch, config.lease_s, totals),
            lending=Lending(pool),
            totals=totals,
        )

    def knows(self, key: AttemptKey) -> bool:
        """Something is filed under this key."""
        return key in self.roster or key in self.leases or key in self.lending

    @property
    def free_slots(self) -> int:
        """How many more sequences may come to decode here; leases count as such."""
        busy = self.roster.in_state(_S.PREFILLING, _S.RUNNING)
        return self.config.max_running - len(self.leases) - sum(s.local for s in busy)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens accepted and not computed yet."""
        return sum(s.uncomputed for s in self.roster.in_state(_S.WAITING, _S.PREFILLING))

    def report(self, draining: bool, step_s: float) -> WorkerReport:
        by_state = Counter(s.state for s in self.roster)
        running = self.roster.in_state(_S.RUNNING)
        return WorkerReport(
            worker_id=self.config.worker_id,
            role=self.config.role,
            epoch=self.config.epoch,
            draining=draining,
            total_blocks=self.pool.total,
            free_blocks=self.pool.free,
            cached_blocks=self.pool.cached,
            leased_blocks=self.leases.blocks,
            lent_blocks=self.lending.blocks,
            quarantined_blocks=self.pool.quarantined,
            waiting=by_state[_S.WAITING],
            running=by_state[_S.PREFILLING] + by_state[_S.RUNNING],
            held=by_state[_S.HANDOFF],
            queued_tokens=self.queued_tokens,
            running_tokens=sum(len(s.tokens) for s in running),
            step_ms=step_s * 1000,
            steps_total=self.totals.steps,
            prompt_tokens_total=self.totals.prompt_tokens,
            cached_tokens_total=self.totals.cached_tokens,
            generated_tokens_total=self.totals.generated_tokens,
            counters=self.totals.counters(),
        )

    def check_integrity(self) -> None:
        """Raises InternalError unless every reference and every block is accounted for."""
        self.pool.check_integrity(
            [*self.roster.tables(), *self.leases.tables(), *self.lending.tables()]
        )
        if self.pool.quarantined != self.leases.fenced_blocks():
            raise InternalError(
                f"{self.pool.quarantined} blocks are in quarantine, "
                f"leases account for {self.leases.fenced_blocks()}"
            )
        if self.free_slots < 0:
            raise InternalError(f"{-self.free_slots} sequences more than max_running allows")
        for seq in self.roster:
            if seq.partial and seq.state is not _S.PREFILLING:
                raise InternalError(f"{seq.key} is {seq.state}, and between two layers")
            covered = len(seq.block_ids) * self.config.block_size
            if not seq.computed <= min(covered, len(seq.tokens)):
                raise InternalError(
                    f"{seq.key}: {seq.computed} of {len(seq.tokens)} tokens computed, "
                    f"in blocks for {covered}"
                )
