"""Blocks that movers read.  Lent blocks stay whatever becomes of the sequence they came from."""

from collections.abc import Iterable, Iterator

from core.ids import AttemptKey, BlockId
from engine.policy.blocks import BlockPool


class Lending:
    """Owner of one reference to each lent block, per attempt it was lent for."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._lent: dict[AttemptKey, set[BlockId]] = {}

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._lent

    @property
    def blocks(self) -> int:
        """Distinct blocks lent."""
        return len(set().union(*self._lent.values()))

    def lend(self, key: AttemptKey, ids: Iterable[BlockId]) -> None:
        new = set(ids)
        if not new:
            return
        self._pool.hold(new)
        self._lent.setdefault(key, set()).update(new)

    def take_back(self, key: AttemptKey, ids: Iterable[BlockId]) -> None:
        """The mover is done with these.  Idempotent: blocks not lent for `key` are passed over."""
        lent = self._lent.get(key, set())
        back = [b for b in dict.fromkeys(ids) if b in lent]
        lent.difference_update(back)
        if not lent:
            self._lent.pop(key, None)
        self._pool.release(back)

    def tables(self) -> Iterator[set[BlockId]]:
        yield from self._lent.values()
