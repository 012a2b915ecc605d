"""The block hashes of one growing token sequence, each computed once."""

from collections.abc import Sequence

from core.ids import BlockHash
from core.prefix import chain


class PrefixChain:
    """Hashes of full blocks, extended on demand; tokens already hashed must not change."""

    def __init__(self, seed: BlockHash, block_size: int) -> None:
        self._seed = seed
        self._block_size = block_size
        self._hashes: list[BlockHash] = []

    def first(self, blocks: int, tokens: Sequence[int]) -> list[BlockHash]:
        """Hashes of the first `blocks` blocks, all of which `tokens` must fill."""
        for i in range(len(self._hashes), blocks):
            parent = self._hashes[-1] if self._hashes else self._seed
            start = i * self._block_size
            self._hashes.append(chain(parent, tokens[start : start + self._block_size]))
        return self._hashes[:blocks]
