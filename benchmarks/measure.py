"""What one request, and one run of many, took."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from sending: `first` and `last` token; `tokens` in all."""

    first: float
    last: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """wall: seconds from the first request sent to the last token received."""

    timings: tuple[Timing, ...]
    wall: float

    @property
    def ttft_ms(self) -> float:
        return 1e3 * median(t.first for t in self.timings)

    @property
    def tpot_ms(self) -> float:
        """Mean time per token after the first; median over requests."""
        return 1e3 * median((t.last - t.first) / max(1, t.tokens - 1) for t in self.timings)

    @property
    def tokens_per_s(self) -> float:
        return sum(t.tokens for t in self.timings) / self.wall


def middle(runs: Sequence[Run]) -> tuple[float, float, float]:
    """(TTFT ms, TPOT ms, tokens/s), the median of each over repeated runs."""
    return (
        median(r.ttft_ms for r in runs),
        median(r.tpot_ms for r in runs),
        median(r.tokens_per_s for r in runs),
    )
