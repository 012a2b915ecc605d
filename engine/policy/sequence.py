"""One attempt inside one engine: its tokens, its blocks, how far it is."""

from dataclasses import dataclass, field

from core.ids import AttemptKey, BlockId
from core.messages import Grant
from core.sampling import Sampling
from core.states import SEQUENCE, SequenceEvent, SequenceState, advance
from engine.policy.chain import PrefixChain
from engine.policy.plan import LayerGroup, SampleAt, Work


@dataclass(slots=True)
class Sequence:
    """Mutable; the scheduler is its only writer.  Times in seconds on the scheduler's clock.

    tokens: prompt and outputs, the last one's KV usually not computed yet.
    emitted: number of the next output token, over all attempts of the request.
    computed: leading tokens whose KV is in `block_ids`.
    published: leading blocks of those whose hash the pool knows.
    sent: leading places of the grant that the destination has or that were lent to the mover.
    in_flight: a step that reads and writes its blocks is running.
    partial: its last work, if its tokens have not passed all layers yet.
    waited: it gave way once to a prompt that begins alike.
    awaits_grammar: what its output must match is not compiled; no step for it.
    """

    key: AttemptKey
    owner: str
    tokens: list[int]
    emitted: int
    sampling: Sampling
    chain: PrefixChain
    arrival: float
    deadline: float
    grant: Grant | None = None
    state: SequenceState = SequenceState.WAITING
    block_ids: list[BlockId] = field(default_factory=list)
    computed: int = 0
    published: int = 0
    sent: int = 0
    cached_tokens: int = 0
    started_at: float | None = None
    first_token_at: float | None = None
    in_flight: bool = False
    partial: Work | None = None
    waited: bool = False
    awaits_grammar: bool = False

    def advance(self, event: SequenceEvent) -> None:
        """Raises InternalError on an illegal move."""
        self.state = advance(SEQUENCE, self.state, event)

    @property
    def local(self) -> bool:
        """Decodes here to the end."""
        return self.grant is None

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.computed

    def work(self, count: int, block_size: int, layers: LayerGroup | None = None) -> Work:
        """Take the next `count` tokens through these layers (None: all); sample if those are all
        there are and the last layer is among them."""
        end = self.computed + count
        last = end == len(self.tokens) and (layers is None or layers.is_last)
        return Work(
            key=self.key,
            token_ids=tuple(self.tokens[self.computed : end]),
            start=self.computed,
            block_ids=tuple(self.block_ids[: -(-end // block_size)]),
            sample=self._sample_at() if last else None,
            layers=layers,
        )

    def passed(self, work: Work) -> None:
        """The step over `work`, its latest, is done."""
        self.partial = None if work.is_complete else work
        self.computed += len(work.token_ids) if work.is_complete else 0

    def _sample_at(self) -> SampleAt:
        first = self.first_token_at is None
        if not self.sampling.looks_back:
            return SampleAt(self.sampling, self.emitted, first=first)
        prompt = len(self.tokens) - self.emitted
        return SampleAt(self.sampling, self.emitted, tuple(self.tokens), prompt, first, self.key)
