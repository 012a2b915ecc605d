"""One attempt inside one engine: its tokens, its blocks, how far it is."""

from dataclasses import dataclass, field

from core.ids import AttemptKey, BlockId
from core.messages import Grant, Sampling
from core.states import SEQUENCE, SequenceEvent, SequenceState, advance
from engine.policy.chain import PrefixChain
from engine.policy.plan import SampleAt, Work


@dataclass(slots=True)
class Sequence:
    """Mutable; the scheduler is its only writer.  Times in seconds on the scheduler's clock.

    tokens: prompt and outputs, the last one's KV usually not computed yet.
    emitted: number of the next output token, over all attempts of the request.
    computed: leading tokens whose KV is in `block_ids`.
    published: leading blocks of those whose hash the pool knows.
    sent: leading places of the grant that the destination has or that were lent to the mover.
    in_flight: a step that reads and writes its blocks is running.
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

    def work(self, count: int, block_size: int) -> Work:
        """Compute the next `count` tokens; sample if those are all there are."""
        end = self.computed + count
        return Work(
            key=self.key,
            token_ids=tuple(self.tokens[self.computed : end]),
            start=self.computed,
            block_ids=tuple(self.block_ids[: -(-end // block_size)]),
            sample=SampleAt(self.sampling, self.emitted) if end == len(self.tokens) else None,
        )
