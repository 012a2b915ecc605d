"""Which prompt tokens the next step computes: first come, first served, in chunks."""

from core.states import SequenceEvent, SequenceState
from engine.policy.blocks import BlockPool
from engine.policy.config import SchedulerConfig
from engine.policy.plan import Work
from engine.policy.roster import Roster
from engine.policy.sequence import Sequence
from engine.policy.totals import Totals

_S = SequenceState


class PrefillScheduler:
    """Starts waiting sequences and deals the token budget out among the started ones.

    A sequence gets all blocks of its context when it starts, so that a started prefill always
    ends: two half-allocated ones cannot wait for each other.  One free block stays for each
    running sequence, lest the newcomer be preempted by the next block anybody needs.
    """

    def __init__(
        self, roster: Roster, pool: BlockPool, config: SchedulerConfig, totals: Totals
    ) -> None:
        self._roster = roster
        self._pool = pool
        self._config = config
        self._totals = totals

    def plan(self, budget: int, slots: int, now: float) -> list[Work]:
        """Chunks of `budget` tokens together.  slots: how many more sequences may decode here.

        A sequence without a slot is overtaken by those that need none; one without blocks
        keeps all later ones from starting, or small ones would starve it for ever.
        """
        works: list[Work] = []
        blocked = False
        for seq in self._roster.in_state(_S.WAITING, _S.PREFILLING):
            if budget == 0:
                break
            if seq.state is _S.WAITING:
                if blocked or (seq.local and slots <= 0):
                    continue
                blocked = not self._start(seq, now)
                if blocked:
                    continue
                slots -= seq.local
            count = min(budget, seq.uncomputed)
            budget -= count
            works.append(seq.work(count, self._config.block_size))
        return works

    def _start(self, seq: Sequence, now: float) -> bool:
        """Give it its blocks, the cached ones of its prefix included.  False: not enough free.

        The block of the last token is never taken from the cache: its logits are needed.
        """
        size = self._config.block_size
        total = len(seq.tokens)
        claim = self._pool.claim(
            seq.chain.first((total - 1) // size, seq.tokens),
            self._config.blocks_for(total),
            headroom=len(self._roster.in_state(_S.RUNNING)),
        )
        if claim is None:
            return False
        seq.advance(SequenceEvent.START)
        seq.block_ids = list(claim.block_ids)
        seq.computed = claim.present * size
        seq.published = claim.present
        if seq.started_at is None:
            seq.started_at = now
            seq.cached_tokens = seq.computed
            self._totals.prompt_tokens += total
            self._totals.cached_tokens += seq.computed
        return True
