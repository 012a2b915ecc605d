"""Which sequences begin with the same blocks of the KV pool, to be attended over once.

tables      a a a b b       groups      a a a: all four       or      a a a b: the first two,
            a a a b c                                                 a a a d: the other two
            a a a d e
            a a a d f                   whichever saves more reading
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Any)


@dataclass(frozen=True, slots=True)
class PrefixGroup(Generic[T]):
    """members: numbers of the sequences, rising; their tables all begin with `prefix`."""

    members: tuple[int, ...]
    prefix: tuple[T, ...]

    @property
    def saved(self) -> int:
        """Entries that need not be read again for each member."""
        return (len(self.members) - 1) * len(self.prefix)


def prefix_groups(tables: Sequence[tuple[T, ...]], worth: int = 1) -> list[PrefixGroup[T]]:
    """Groups without common members, that each save at least `worth` entries.

    tables: of each sequence, what can be shared: ids of blocks, or of runs of blocks.  One level
    of sharing, by dynamic programming over the tree of tables (BatchLLM, arXiv:2412.03594): a
    group as a whole or the best groups of its branches, whichever saves more.
    """
    return _best(sorted((table, i) for i, table in enumerate(tables)), 0, worth)


def _best(order: list[tuple[tuple[T, ...], int]], shared: int, worth: int) -> list[PrefixGroup[T]]:
    """order: tables, sorted, that agree in their first `shared` entries."""
    if len(order) < 2:
        return []
    first, last = order[0][0], order[-1][0]
    while shared < len(first) and first[shared] == last[shared]:
        shared += 1
    longer = [entry for entry in order if len(entry[0]) > shared]
    branches = [
        group
        for _, branch in groupby(longer, key=lambda entry: entry[0][shared])
        for group in _best(list(branch), shared + 1, worth)
    ]
    whole = PrefixGroup(tuple(sorted(i for _, i in order)), first[:shared])
    if whole.saved >= max(worth, sum(group.saved for group in branches)):
        return [whole]
    return branches
