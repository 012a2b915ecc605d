"""Which prompts may join the next step, and their chunks as the policy deals them."""

from collections.abc import Sequence as Many

from core.ids import BlockHash
from core.states import SequenceEvent, SequenceState
from engine.policy.blocks import BlockPool
from engine.policy.config import SchedulerConfig
from engine.policy.plan import Work
from engine.policy.policies.port import Load, Prompt, Share, StepPolicy
from engine.policy.roster import Roster
from engine.policy.sequence import Sequence
from engine.policy.totals import Totals

_S = SequenceState


class PrefillScheduler:
    """Starts waiting sequences and takes the started ones on.

    A sequence gets all blocks of its context when it starts, so that a started prefill always
    ends: two half-allocated ones cannot wait for each other.  One free block stays for each
    running sequence, lest the newcomer be preempted by the next block anybody needs.
    """

    def __init__(
        self,
        roster: Roster,
        pool: BlockPool,
        policy: StepPolicy,
        config: SchedulerConfig,
        totals: Totals,
    ) -> None:
        self._roster = roster
        self._pool = pool
        self._policy = policy
        self._config = config
        self._totals = totals
        self._streak = 0

    def plan(self, slots: int, now: float) -> list[Work]:
        """slots: how many more sequences may decode here.

        A sequence without blocks keeps all later ones from starting, or small ones would starve
        it for ever: the policy is asked again without them.
        """
        candidates = self._candidates(slots)
        while True:
            shares = self._policy.compose(self._load(candidates))
            stuck = self._start_all(candidates, shares, now)
            if stuck is None:
                break
            candidates = [
                seq for i, seq in enumerate(candidates) if i < stuck or seq.state is not _S.WAITING
            ]
        self._streak = self._streak + 1 if shares else 0
        size = self._config.block_size
        return [candidates[s.prompt].work(s.tokens, size, s.layers) for s in shares]

    def _candidates(self, slots: int) -> list[Sequence]:
        """By age.  A sequence without a slot is overtaken by those that need none, one without its
        grammar by all.

        Of several that begin alike one goes ahead, the others wait until its blocks of the
        common beginning can be matched, and start with what it computed (shared-prefix groups of
        BatchLLM, arXiv:2412.03594).  They wait for a candidate only: if it ends, they go on.
        """
        coming: set[BlockHash] = set()
        for seq in self._roster.in_state(_S.PREFILLING):
            coming.update(self._hashes(seq))
        found = []
        for seq in self._roster.in_state(_S.WAITING, _S.PREFILLING):
            if seq.state is _S.WAITING:
                if seq.awaits_grammar or (seq.local and slots <= 0):
                    continue
                if self._awaits(seq, coming):
                    continue
                coming.update(self._hashes(seq))
                slots -= seq.local
            found.append(seq)
        return found

    def _awaits(self, seq: Sequence, coming: set[BlockHash]) -> bool:
        """The first block that the cache lacks is about to be computed for somebody else."""
        hashes = self._reusable(seq)
        present = self._pool.cached_prefix(hashes)
        awaits = present < len(hashes) and hashes[present] in coming
        if awaits and not seq.waited:
            seq.waited = True
            self._totals.shared_prefix_waits += 1
        return awaits

    def _load(self, candidates: Many[Sequence]) -> Load:
        decodes = len(self._roster.in_state(_S.RUNNING))
        return Load(decodes, tuple(self._prompt(seq) for seq in candidates), self._streak)

    def _prompt(self, seq: Sequence) -> Prompt:
        """The start of one may evict cached blocks that another counts on here: that one then has
        more to compute than its share, and goes on in the next step."""
        if seq.state is _S.WAITING:
            cached = self._pool.cached_prefix(self._reusable(seq)) * self._config.block_size
            return Prompt(seq.uncomputed - cached)
        work = seq.partial
        if work is None or work.layers is None:
            return Prompt(seq.uncomputed)
        return Prompt(seq.uncomputed, len(work.token_ids), work.layers.stop)

    def _start_all(self, candidates: Many[Sequence], shares: Many[Share], now: float) -> int | None:
        """Index of the first candidate that cannot start; None: all with a share have."""
        for share in shares:
            seq = candidates[share.prompt]
            if seq.state is _S.WAITING and not self._start(seq, now):
                return share.prompt
        return None

    def _start(self, seq: Sequence, now: float) -> bool:
        """Give it its blocks, the cached ones of its prefix included.  False: not enough free."""
        total = len(seq.tokens)
        claim = self._pool.claim(
            self._reusable(seq),
            self._config.blocks_for(total),
            headroom=len(self._roster.in_state(_S.RUNNING)),
        )
        if claim is None:
            return False
        seq.advance(SequenceEvent.START)
        seq.block_ids = list(claim.block_ids)
        seq.computed = claim.present * self._config.block_size
        seq.published = claim.present
        if seq.started_at is None:
            seq.started_at = now
            seq.cached_tokens = seq.computed
            self._totals.prompt_tokens += total
            self._totals.cached_tokens += seq.computed
        return True

    def _hashes(self, seq: Sequence) -> list[BlockHash]:
        return seq.chain.first(len(seq.tokens) // self._config.block_size, seq.tokens)

    def _reusable(self, seq: Sequence) -> list[BlockHash]:
        """What may be taken from the cache: not the last token's block, its logits are needed."""
        return seq.chain.first((len(seq.tokens) - 1) // self._config.block_size, seq.tokens)
