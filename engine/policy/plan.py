"""What one engine step computes, as a value: the scheduler makes it, the runner executes it."""

from dataclasses import dataclass

from core.ids import AttemptKey, BlockId
from core.messages import Sampling


@dataclass(frozen=True, slots=True)
class SampleAt:
    """Sample output token number `index` (0-based over the whole request) from the last row."""

    sampling: Sampling
    index: int


@dataclass(frozen=True, slots=True)
class Work:
    """A run of consecutive positions of one sequence.

    token_ids: inputs at positions start, start + 1, …; their K/V are written by this step.
    block_ids: the sequence's block table, covering positions 0 … start + len(token_ids) - 1;
    K/V of positions below `start` are already there.
    """

    key: AttemptKey
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[BlockId, ...]
    sample: SampleAt | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """At most one `Work` per sequence.  Empty: nothing to do."""

    works: tuple[Work, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(w.token_ids) for w in self.works)
