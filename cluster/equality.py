"""Are served tokens those of a reference loop?  Pure; whoever asks brings both sides.

A different token is excused only where the reference's two best logits are closer than a tie:
another order of summation may pick the other.  The comparison then goes on from the reference's
token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

TIE = 1e-3
"""In float32."""
TIE_BFLOAT16 = 0.25
"""Two steps of bfloat16 at the size of a winning logit (16 to 32)."""


class Step(Protocol):
    """A reference token, and how far its logit is above the second best."""

    @property
    def token(self) -> int: ...
    @property
    def gap(self) -> float: ...


Ask: TypeAlias = Callable[[tuple[int, ...], int], Sequence[int]]
"""(prompt, number of tokens) -> what the cluster generates."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Output token number `position` differs, and no tie excuses it."""

    position: int
    expected: int
    got: int | None
    gap: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """tokens: how many were compared; excused: how many differed at a tie."""

    tokens: int
    excused: int = 0
    mismatch: Mismatch | None = None


def compare(
    prompt: tuple[int, ...],
    reference: Sequence[Step],
    served: Sequence[int],
    ask: Ask,
    tie: float = TIE,
) -> Verdict:
    """Judge `served`, the answer to `prompt`; `ask` is called only to go on after a tie.

    A served answer may be shorter only if the reference is too.
    """
    expected = [step.token for step in reference]
    excused = 0
    agreed = list(served)
    while (at := _first_difference(expected, agreed)) is not None:
        got = agreed[at] if at < len(agreed) else None
        if reference[at].gap >= tie:
            return Verdict(at, excused, Mismatch(at, expected[at], got, reference[at].gap))
        excused += 1
        head = expected[: at + 1]
        left = len(expected) - len(head)
        agreed = head + (list(ask((*prompt, *head), left)) if left else [])
    return Verdict(len(expected), excused)


def _first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    for at, token in enumerate(expected):
        if at >= len(got) or got[at] != token:
            return at
    return None
