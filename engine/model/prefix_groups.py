"""Which decoding sequences share leading blocks of the KV pool, enough to attend over them once.

tables      a a a b b       groups      a a a: all four       or      a a a b: the first two,
            a a a b c                                                 a a a d: the other two
            a a a d e
            a a a d f                   whichever saves more reading
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from core.ids import BlockId

WORTH_TOKENS = 8192
"""A group pays from this many positions on that need not be read again; docs/scheduling.md has the
measurements."""


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """members: numbers of the sequences, rising; their tables all begin with `blocks`."""

    members: tuple[int, ...]
    blocks: tuple[BlockId, ...]

    @property
    def saved(self) -> int:
        """Blocks that need not be read again for each member."""
        return (len(self.members) - 1) * len(self.blocks)


def prefix_groups(
    tables: Sequence[tuple[BlockId, ...]], block_size: int, worth: int = WORTH_TOKENS
) -> list[PrefixGroup]:
    """Groups without common members, each worth it.

    tables: of each sequence the blocks that lie wholly before the position it computes.  One
    level of sharing, by dynamic programming over the tree of tables (BatchLLM,
    arXiv:2412.03594): a group as a whole or the best groups of its branches, whichever saves more.
    """
    order = sorted((table, i) for i, table in enumerate(tables))
    return _best(order, 0, -(-worth // block_size))


def _best(
    order: list[tuple[tuple[BlockId, ...], int]], shared: int, worth: int
) -> list[PrefixGroup]:
    """order: tables, sorted, that agree in their first `shared` blocks; worth: in blocks."""
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
