"""KV memory that peers of one host can read and only its owner can write.

    page 0 ...                       page k ...
    ┌──────────────────────┬────────┬─────────┬─────────┬───
    │ generation × blocks  │ beacon │ block 0 │ block 1 │ …
    └──────────────────────┴────────┴─────────┴─────────┴───
The memfd is sealed after its owner, all ranks of it, mapped it: nobody can resize it (so no
reader gets SIGBUS) and nobody can map it writable again.  The pages live until the last mapping
of them goes.
"""

import fcntl
import logging
import mmap
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from core.errors import ConfigError, Stage, TransferFailed, TriremeError

log = logging.getLogger(__name__)

_WORD = 8
_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; Python's fcntl does not name it
_NO_RESIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEALS = _NO_RESIZE | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since Linux 5.14


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of an arena; all that a peer must be told to map it."""

    blocks: int
    block_bytes: int

    @property
    def table_bytes(self) -> int:
        """Generations and beacon, rounded up so that blocks start on a page."""
        return -(-(self.blocks + 1) * _WORD // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def total_bytes(self) -> int:
        return self.table_bytes + self.blocks * self.block_bytes


class _Mapping:
    """Views into one mapping of an arena."""

    def __init__(self, mapping: mmap.mmap, geometry: Geometry) -> None:
        self.geometry = geometry
        self._mapping = mapping
        table, end = geometry.table_bytes, geometry.total_bytes
        self._whole = memoryview(mapping)
        self._table = self._whole[:table].cast("Q")
        self._generations = self._table[: geometry.blocks]
        self._blocks = self._whole[table:end]

    @property
    def generations(self) -> memoryview:
        """Format 'Q', one per block."""
        return self._generations

    @property
    def blocks(self) -> memoryview:
        """Format 'B', block i at [i * block_bytes, (i + 1) * block_bytes)."""
        return self._blocks

    @property
    def beacon(self) -> int:
        """64 random bits that tell this arena from any other; a reader checks its mapping by it."""
        beacon: int = self._table[self.geometry.blocks]
        return beacon

    def block(self, block_id: int) -> memoryview:
        """The bytes of one block.  Raises TransferFailed when there is no such block."""
        if not 0 <= block_id < self.geometry.blocks:
            raise TransferFailed(
                f"block {block_id} is out of range, the arena has {self.geometry.blocks}; "
                "the sender and the pool disagree, recompute",
                stage=Stage.TRANSFER,
            )
        size = self.geometry.block_bytes
        return self._blocks[block_id * size : (block_id + 1) * size]

    def close(self) -> None:
        """Unmap.  Memory that somebody still has a view of stays until that view goes."""
        try:
            for view in (self._generations, self._blocks, self._table, self._whole):
                view.release()
            self._mapping.close()
        except BufferError:
            log.debug("an arena is still viewed; it is unmapped with its last view")


class PeerArena(_Mapping):
    """Somebody else's arena, read-only."""


class RankArena(_Mapping):
    """The arena of this process's worker, made by the leader of its gang; writable."""


class MemfdArena(_Mapping):
    """This process's own arena.  Generations start at 0; blocks are zero."""

    def __init__(self, fd: int, mapping: mmap.mmap, geometry: Geometry) -> None:
        super().__init__(mapping, geometry)
        self._fd = fd
        self._table[geometry.blocks] = secrets.randbits(64)

    @classmethod
    def create(
        cls,
        blocks: int,
        block_bytes: int,
        populate: bool = True,
        share: Callable[[int], None] | None = None,
    ) -> "MemfdArena":
        """Reserve and, with populate, touch all pages.  Raises ConfigError when memory lacks.

        share: called with the descriptor while it can be mapped for writing; returns when the
        other ranks of the owner have done so (`map_rank`).
        """
        geometry = Geometry(blocks, block_bytes)
        fd = os.memfd_create("trireme-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, geometry.total_bytes)
            mapping = mmap.mmap(fd, geometry.total_bytes, flags=mmap.MAP_SHARED)
            if share is not None:
                share(fd)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            _advise(mapping, mmap.MADV_HUGEPAGE, "huge pages")
            if populate:
                _advise(mapping, _MADV_POPULATE_WRITE, "populating ahead")
            return cls(fd, mapping, geometry)
        except TriremeError:
            os.close(fd)
            raise
        except (OSError, OverflowError, ValueError) as error:
            os.close(fd)
            raise ConfigError(
                f"kv.memory_mb: no arena of {geometry.total_bytes >> 20} MiB: {error}; "
                "ask for less KV memory",
                stage=Stage.START,
                field="kv.memory_mb",
            ) from error

    @property
    def fd(self) -> int:
        """For passing to a peer of the same user; it can only be mapped for reading."""
        return self._fd

    def close(self) -> None:
        super().close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def map_rank(fd: int, geometry: Geometry) -> RankArena:
    """Map the arena of one's own gang, before it is sealed; `fd` stays the caller's.

    Raises OSError.
    """
    return RankArena(mmap.mmap(fd, geometry.total_bytes, flags=mmap.MAP_SHARED), geometry)


def map_peer(fd: int, geometry: Geometry) -> PeerArena:
    """Map a peer's arena read-only; `fd` stays the caller's.

    Raises TransferFailed when it is not a sealed arena of that geometry: an unsealed one could
    be shrunk under this reader, whose next read would be SIGBUS.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size
        if seals & _NO_RESIZE != _NO_RESIZE or size != geometry.total_bytes:
            raise TransferFailed(
                f"not a sealed arena of {geometry.total_bytes} bytes (size {size}, seals {seals}); "
                "the peer must run the same version",
                stage=Stage.TRANSFER,
            )
        return PeerArena(mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ), geometry)
    except (OSError, ValueError) as error:
        raise TransferFailed(
            f"cannot map the peer's arena: {error}; use mover tcp", stage=Stage.TRANSFER
        ) from error


def _advise(mapping: mmap.mmap, advice: int, what: str) -> None:
    """EINVAL means that this kernel lacks the advice, which costs speed only; others count."""
    try:
        mapping.madvise(advice)
    except OSError as error:
        if error.errno not in (22, 38, 95):  # EINVAL, ENOSYS, EOPNOTSUPP
            raise
        log.info("arena: %s is not supported by this kernel", what)
