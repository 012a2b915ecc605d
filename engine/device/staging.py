"""A KV pool on a device, and the arena beside it that movers read and write.

    device   pool.rows  ◀── bring_in: landed, before the lease counts it ──┐
                │                                                          │
                └── send_out: lent, before the mover reads it ──▶ arena.rows ◀══▶ peers

A block has the same number in both.  Blocks found by a prefix hit are on the device and stay
there.  Where the pool lies in the arena itself (`InPlace`) there is nothing to copy.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from torch import Tensor

from core.ids import BlockId, Epoch, LeaseId
from core.ports import Landing
from engine.device.pool import KVPool

log = logging.getLogger(__name__)

Wait: TypeAlias = Callable[[], None]
Copy: TypeAlias = Callable[[Tensor, Tensor, Sequence[int]], Wait]
"""(target, source, rows): starts to copy these rows; the answer waits until they are there.
Thread-safe; both raise RuntimeError."""


class Staging(Protocol):
    """What stands between an engine and its movers."""

    def send_out(self, block_ids: Sequence[BlockId]) -> Wait:
        """Starts to bring lent blocks to where movers read them.  Until the answer has waited
        they must stay lent."""
        ...

    def landing(self, engine: Landing) -> Landing:
        """The engine's landing as movers shall use it."""
        ...


class InPlace:
    """`Staging` of a pool that lies in the arena."""

    def send_out(self, block_ids: Sequence[BlockId]) -> Wait:
        return _nothing

    def landing(self, engine: Landing) -> Landing:
        return engine


class Staged:
    """`Staging` of a pool with memory of its own, laid out like the arena's."""

    def __init__(self, pool: KVPool, arena: KVPool, copy: Copy) -> None:
        self._pool = pool
        self._arena = arena
        self._copy = copy

    def send_out(self, block_ids: Sequence[BlockId]) -> Wait:
        return self._copy(self._arena.rows, self._pool.rows, block_ids) if block_ids else _nothing

    def bring_in(self, block_ids: Sequence[BlockId]) -> None:
        """Returns when landed blocks are on the device.  Raises RuntimeError."""
        self._copy(self._pool.rows, self._arena.rows, block_ids)()

    def landing(self, engine: Landing) -> Landing:
        return StagedLanding(engine, self)


class StagedLanding:
    """`Landing` under which a block counts as landed when it is on the device.  Until its `end`
    nobody else touches it."""

    def __init__(self, engine: Landing, staged: Staged) -> None:
        self._engine = engine
        self._staged = staged
        self._begun: dict[tuple[LeaseId, int], tuple[BlockId, ...]] = {}

    def begin(
        self, lease_id: LeaseId, epoch: Epoch, first_index: int, count: int
    ) -> tuple[BlockId, ...]:
        blocks = self._engine.begin(lease_id, epoch, first_index, count)
        self._begun[lease_id, first_index] = blocks
        return blocks

    def end(self, lease_id: LeaseId, first_index: int, count: int, ok: bool) -> None:
        blocks = self._begun.pop((lease_id, first_index))
        self._engine.end(lease_id, first_index, count, ok and self._brought_in(blocks))

    def _brought_in(self, blocks: Sequence[BlockId]) -> bool:
        try:
            self._staged.bring_in(blocks)
        except RuntimeError as error:
            log.error("landed blocks did not reach the device: %s; they must come again", error)
            return False
        return True


def _nothing() -> None:
    """There is nothing to wait for."""
