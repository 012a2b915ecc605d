"""What one request, and one run of many, took, and how runs compare."""

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


def ratio(mine: Sequence[Sequence[float]], base: Sequence[Sequence[float]], column: int) -> str:
    """Rows of figures, one per round: the median of one column, and in brackets the median of
    its ratios to that column of `base`, round by round."""
    ratios = median(a[column] / b[column] for a, b in zip(mine, base, strict=True))
    return f"{median(row[column] for row in mine):.1f} ({ratios:.2f})"
