"""A report as text: numbers by domain, and which experts each domain uses."""

from collections.abc import Iterator, Sequence

from benchmarks.learned_moe.measure import Report
from benchmarks.learned_moe.tokens import SNIPPET

_SHADES = " ░▒▓█"
_STEPS = (0.25, 0.75, 1.5, 3.0)
"""Bounds between the shades, in units of an even share."""


def lines(report: Report) -> Iterator[str]:
    yield f"{'held-out text':<14}{'perplexity':>12}{'unigram':>10}   mean cosine of signatures with"
    yield f"{'':39}" + "".join(f"{n:>9}" for n in report.perplexity)
    for (name, perplexity), row in zip(report.perplexity.items(), report.cosines, strict=True):
        numbers = f"{perplexity:>12.1f}{report.unigram[name]:>10.1f}"
        yield f"{name:<14}{numbers}   " + "".join(f"{c:>9.2f}" for c in row)
    yield ""
    yield f"answers to sums never seen that are right: {report.right_sums:.0%}"
    yield f"{SNIPPET}-token snippets nearest to their own domain: {report.right_domains:.1%}"
    yield ""
    yield from _heat_map(report)


def _heat_map(report: Report) -> Iterator[str]:
    layers = len(next(iter(report.centroids.values())))
    experts = len(next(iter(report.centroids.values()))[0])
    yield "share of each expert in a domain's choices, " + _legend()
    for layer in range(layers):
        numbers = "".join(f"{e:>3}" for e in range(experts))
        yield f"layer {layer}   {numbers}"
        for name, centroid in report.centroids.items():
            yield f"  {name:<8}" + _shaded(centroid[layer])


def _legend() -> str:
    bounds = zip(_SHADES, ("less", *(f"from {s}" for s in _STEPS)), strict=True)
    return "in even shares: " + ", ".join(f"'{shade}' {text}" for shade, text in bounds)


def _shaded(shares: Sequence[float]) -> str:
    even = 1 / len(shares)
    return "".join(f" {2 * _SHADES[sum(s >= even * b for b in _STEPS)]}" for s in shares)
