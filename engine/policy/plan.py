"""What one engine step computes, as a value: the scheduler makes it, the runner executes it."""

from dataclasses import dataclass

from core.ids import AttemptKey, BlockId
from core.sampling import Sampling, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampleAt:
    """Sample output token number `index` (0-based over the whole request) from the last row.

    tokens: prompt and outputs so far, where `sampling.looks_back`; else empty.  prompt: how many
    of them are the prompt.  first: no token of this attempt was sampled before.  key: whose tokens
    they are, for who follows them from step to step.
    """

    sampling: Sampling
    index: int
    tokens: tuple[int, ...] = ()
    prompt: int = 0
    first: bool = False
    key: AttemptKey | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a work's last row became.  logprobs: where `sampling.logprobs` asks for them.

    expert_counts: [MoE layer x expert], of all tokens before it; with an attempt's first only.
    """

    token: int
    logprobs: TokenLogprobs | None = None
    expert_counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers start to stop - 1 of `of`."""

    start: int
    stop: int
    of: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.of


@dataclass(frozen=True, slots=True)
class Work:
    """A run of consecutive positions of one sequence.

    token_ids: inputs at positions start, start + 1, …; their K/V are written by this step.
    block_ids: the sequence's block table, covering positions 0 … start + len(token_ids) - 1;
    K/V of positions below `start` are already there.
    layers: those that the tokens pass in this step, None for all.  A work that stops before the
    last layer is gone on with in the very next plan, or never.
    """

    key: AttemptKey
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[BlockId, ...]
    sample: SampleAt | None = None
    layers: LayerGroup | None = None

    @property
    def is_complete(self) -> bool:
        """Its tokens have passed all layers after this step."""
        return self.layers is None or self.layers.is_last


@dataclass(frozen=True, slots=True)
class Plan:
    """At most one `Work` per sequence.  Empty: nothing to do."""

    works: tuple[Work, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(w.token_ids) for w in self.works)
