"""The KV pool: a worker's block memory, seen as one tensor.

    arena (sealed memfd, made by transport) ── buffer ──▶ KVPool.kv ──▶ attention writes and reads
                                            └─ the same bytes ──▶ movers send and receive blocks

Which block belongs to whom is `engine.policy`'s say.  A pool on another device has memory of its
own, and movers use the arena beside it: see `engine.device.staging`.
"""

from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from core.errors import InternalError, Stage
from core.kvlayout import COUNTER_BYTES, KVLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KVPool:
    """kv: [blocks, layers, 2, kv_heads, block_size, head_dim] in the layout's dtype; a block is
    contiguous, and so is the whole where no counters follow the blocks.
    expert_counts: [blocks, layout.expert_counters] int16.  rows: [blocks, layout.block_bytes]
    uint8, all of it.

    The tensor keeps the buffer exported: drop the pool before the mapping is closed.
    """

    def __init__(self, layout: KVLayout, blocks: int, buffer: memoryview) -> None:
        """buffer: writable, at least blocks * layout.block_bytes.  Raises InternalError."""
        needed = blocks * layout.block_bytes
        if blocks < 1 or buffer.nbytes < needed or buffer.readonly:
            raise InternalError(
                f"a KV pool of {blocks} blocks needs {needed} writable bytes; the buffer has"
                f" {buffer.nbytes}{', read-only' if buffer.readonly else ''}; size it to fit",
                stage=Stage.START,
            )
        whole = torch.frombuffer(buffer, dtype=torch.uint8, count=needed)
        self._divide(layout, whole.view(blocks, -1))

    @classmethod
    def on(cls, device: torch.device, layout: KVLayout, blocks: int) -> "KVPool":
        """A pool in memory of its own, all zeros.  Raises RuntimeError where that lacks."""
        pool = cls.__new__(cls)
        whole = torch.zeros(blocks, layout.block_bytes, dtype=torch.uint8, device=device)
        pool._divide(layout, whole)
        return pool

    def _divide(self, layout: KVLayout, rows: Tensor) -> None:
        blocks = len(rows)
        shape = (layout.layers, 2, layout.kv_heads, layout.block_size, layout.head_dim)
        counters_end = layout.kv_bytes + layout.expert_counters * COUNTER_BYTES
        self.layout = layout
        self.blocks = blocks
        self.rows = rows
        self.kv = rows[:, : layout.kv_bytes].view(DTYPES[layout.dtype]).view(blocks, *shape)
        self.expert_counts = rows[:, layout.kv_bytes : counters_end].view(torch.int16)

    def of_rank(self, rank: int, size: int) -> "KVPool":
        """The same memory as one rank of a tensor-parallel gang sees it: its own KV heads.

        Experts are counted once, by rank 0; what the others count is theirs alone.
        """
        heads = self.layout.kv_heads // size
        part = copy(self)
        part.layout = replace(self.layout, kv_heads=heads)
        part.kv = self.kv[:, :, :, rank * heads : (rank + 1) * heads]
        if rank:
            part.expert_counts = torch.zeros_like(self.expert_counts)
        return part
