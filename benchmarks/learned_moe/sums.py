"""A digit added to or taken from a number below 100, one problem a line: "37+8=45"."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.learned_moe.digest import is_held_out

_LINES = 24
"""Problems to a document."""


@dataclass(frozen=True, slots=True)
class Problem:
    """question ends with "="; answer is the line's rest, without the newline."""

    question: str
    answer: str


def problems(held_out: bool) -> tuple[Problem, ...]:
    """All of one side of the split; a question of one side is never seen on the other."""
    pairs = [(a, b) for a in range(100) for b in range(10)]
    every = [Problem(f"{a}+{b}=", f"{a + b}") for a, b in pairs]
    every += [Problem(f"{a}-{b}=", f"{a - b}") for a, b in pairs if a >= b]
    return tuple(p for p in every if is_held_out(p.question) == held_out)


def documents(among: Sequence[Problem], count: int, source: random.Random) -> tuple[str, ...]:
    return tuple(
        "".join(f"{p.question}{p.answer}\n" for p in source.choices(among, k=_LINES))
        for _ in range(count)
    )
