"""Which sequences decode in the next step, and who gives way when blocks run out."""

from core.states import SequenceState
from engine.policy.blocks import BlockPool
from engine.policy.plan import Work
from engine.policy.roster import Roster
from engine.policy.sequence import Sequence
from engine.policy.totals import Totals

_S = SequenceState


class DecodeScheduler:
    """One token a step for every running sequence.

    On exhaustion the latest arrival loses its blocks and is computed again later (vLLM's
    recompute preemption).  The oldest is thus the last to give way: it always gets on.
    """

    def __init__(self, roster: Roster, pool: BlockPool, block_size: int, totals: Totals) -> None:
        self._roster = roster
        self._pool = pool
        self._block_size = block_size
        self._totals = totals

    def plan(self) -> list[Work]:
        """Oldest first, so that whoever is preempted on the way has no work in the plan yet."""
        works: list[Work] = []
        for seq in self._roster.in_state(_S.RUNNING):
            if seq.state is _S.RUNNING and not seq.awaits_grammar and self._grow(seq):
                works.append(seq.work(1, self._block_size))
        return works

    def _grow(self, seq: Sequence) -> bool:
        """Make sure of a block for the next position.  False: `seq` itself was preempted."""
        if seq.computed < len(seq.block_ids) * self._block_size:
            return True
        while (fresh := self._pool.allocate(1)) is None:
            victim = self._latest()
            self._roster.preempt(victim)
            self._totals.preemptions += 1
            if victim is seq:
                return False
        seq.block_ids.extend(fresh)
        return True

    def _latest(self) -> Sequence:
        """A prefill for another worker is spared: its blocks are partly lent, so little would
        come free, and it ends by itself within a few steps."""
        return [s for s in self._roster.in_state(_S.RUNNING, _S.PREFILLING) if s.local][-1]
