"""Who has which KV block: reference counts, free list, and the prefix cache over both.

              allocate                       quarantine
    free ───────────────────▶ held (refs ≥ 1) ─────────▶ quarantined
    ▲ ▲ ▲                      │   ▲       │                  │
    │ │ └─ release, no hash ───┘   │ match │ release, hash    │
    │ │                            │       ▼                  │
    │ └──────── evict ────────── idle (least recently used)   │
    └───────────────────── unquarantine ──────────────────────┘

A hash names a full block whose KV is complete; it stays until the block is evicted.
Eviction happens only inside `allocate`, so free = free list + idle.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol

from core.errors import InternalError
from core.ids import BlockHash, BlockId


class Generations(Protocol):
    """One counter per block, e.g. the table of an `Arena`, or a list."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


class Claim(NamedTuple):
    """A block table whose first `present` blocks hold the right KV already."""

    block_ids: tuple[BlockId, ...]
    present: int


class BlockPool:
    """Owner of all bookkeeping about blocks; block ids are 0 … total - 1.

    A block's generation grows when it is allocated, evicted, and when it becomes free without
    a hash: never while somebody may read it, always before somebody else writes it.
    """

    def __init__(self, total: int, generations: Generations | None = None) -> None:
        self.total = total
        self._generations: Generations = [0] * total if generations is None else generations
        self._free = [BlockId(i) for i in reversed(range(total))]
        self._refs = [0] * total
        self._hashes: list[BlockHash | None] = [None] * total
        self._index: dict[BlockHash, BlockId] = {}
        self._idle: OrderedDict[BlockId, None] = OrderedDict()
        self._quarantined: set[BlockId] = set()

    @property
    def free(self) -> int:
        """Blocks that an allocation can have, idle cached ones included."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Blocks that a prefix match can find, in use or idle."""
        return len(self._index)

    @property
    def quarantined(self) -> int:
        return len(self._quarantined)

    def generations_of(self, ids: Iterable[BlockId]) -> tuple[int, ...]:
        return tuple(self._generations[b] for b in ids)

    def cached_prefix(self, hashes: Iterable[BlockHash]) -> int:
        """How many blocks `match` would find now."""
        return sum(1 for _ in takewhile(self._index.__contains__, hashes))

    def match(self, hashes: Iterable[BlockHash]) -> tuple[BlockId, ...]:
        """The longest cached prefix.  The caller holds a reference to each block returned."""
        found = []
        for block_hash in hashes:
            block = self._index.get(block_hash)
            if block is None:
                break
            self._idle.pop(block, None)
            self._refs[block] += 1
            found.append(block)
        return tuple(found)

    def allocate(self, count: int) -> tuple[BlockId, ...] | None:
        """`count` private blocks of undefined content, or None and nothing changed."""
        if count > self.free:
            return None
        return tuple(self._take() for _ in range(count))

    def claim(self, hashes: Iterable[BlockHash], blocks: int, headroom: int) -> Claim | None:
        """A table of `blocks` blocks: the cached prefix of `hashes`, then new ones.

        None, and no reference taken, when fewer than `headroom` blocks would stay free.
        """
        present = self.match(hashes)
        missing = blocks - len(present)
        fresh = self.allocate(missing) if missing + headroom <= self.free else None
        if fresh is None:
            self.release(present)
            return None
        return Claim(present + fresh, len(present))

    def hold(self, ids: Iterable[BlockId]) -> None:
        """One more reference to each of some blocks that somebody holds."""
        for block in ids:
            self._require_held(block)
            self._refs[block] += 1

    def release(self, ids: Sequence[BlockId]) -> None:
        """Give back one reference to each.  Raises InternalError if nobody holds one.

        Backwards, so that of an idle chain the tail is evicted first and the rest can match.
        """
        for block in reversed(ids):
            self._require_held(block)
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._retire(block)

    def publish(self, block: BlockId, block_hash: BlockHash) -> None:
        """Let others match this block.  A second block of the same content stays private."""
        self._require_held(block)
        if block_hash in self._index:
            return
        if self._hashes[block] is not None:
            raise InternalError(f"block {block} is published already, under another hash")
        self._hashes[block] = block_hash
        self._index[block_hash] = block

    def quarantine(self, ids: Iterable[BlockId]) -> None:
        """Take the only reference to private blocks away; nobody gets them until the fence."""
        for block in ids:
            if self._refs[block] != 1 or self._hashes[block] is not None:
                raise InternalError(f"block {block} is shared; it cannot be quarantined")
            self._refs[block] = 0
            self._quarantined.add(block)

    def unquarantine(self, ids: Iterable[BlockId]) -> None:
        """No byte can land in these any more: they are free."""
        for block in ids:
            if block not in self._quarantined:
                raise InternalError(f"block {block} is not in quarantine")
            self._quarantined.remove(block)
            self._retire(block)

    def check_integrity(self, holders: Iterable[Iterable[BlockId]] | None = None) -> None:
        """Raises InternalError naming what is wrong.

        holders: every block table that exists; given, it must explain every reference.
        """
        for problem in self._problems():
            raise InternalError(f"block pool: {problem}")
        if holders is None:
            return
        expected = Counter(block for table in holders for block in table)
        for block, refs in enumerate(self._refs):
            if expected[BlockId(block)] != refs:
                raise InternalError(
                    f"block pool: block {block} has {refs} references, "
                    f"{expected[BlockId(block)]} holders"
                )

    def _take(self) -> BlockId:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self._refs[block] = 1
        self._generations[block] += 1
        return block

    def _forget(self, block: BlockId) -> None:
        block_hash = self._hashes[block]
        if block_hash is None:
            raise InternalError(f"idle block {block} has no hash")
        del self._index[block_hash]
        self._hashes[block] = None

    def _retire(self, block: BlockId) -> None:
        if self._hashes[block] is not None:
            self._idle[block] = None
            return
        self._generations[block] += 1
        self._free.append(block)

    def _require_held(self, block: BlockId) -> None:
        if self._refs[block] < 1:
            raise InternalError(f"block {block} is used by somebody who does not hold it")

    def _problems(self) -> Iterator[str]:
        free, idle = set(self._free), set(self._idle)
        held = {BlockId(b) for b, refs in enumerate(self._refs) if refs > 0}
        if len(free) != len(self._free):
            yield "the free list names a block twice"
        places = (free, idle, held, self._quarantined)
        everywhere = free.union(*places)
        if sum(len(p) for p in places) != self.total or len(everywhere) != self.total:
            yield "a block is in two places, or in none"
        named = {BlockId(b): h for b, h in enumerate(self._hashes) if h is not None}
        if {h: b for b, h in named.items()} != self._index or len(named) != len(self._index):
            yield "hash index and blocks disagree"
        if not idle <= named.keys():
            yield "an idle block has no hash"
        if named.keys() & (free | self._quarantined):
            yield "a free or quarantined block has a hash"
        if min(self._refs, default=0) < 0:
            yield "a reference count is negative"
