"""The KV pool: a worker's block memory, seen as one tensor.

    arena (sealed memfd, made by transport) ── buffer ──▶ KVPool.kv ──▶ attention writes and reads
                                            └─ the same bytes ──▶ movers send and receive blocks

The pool is a view and allocates nothing; which block belongs to whom is `engine.policy`'s say.
"""

import torch

from core.errors import InternalError, Stage
from core.kvlayout import KVLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KVPool:
    """kv: [blocks, layers, 2, kv_heads, block_size, head_dim] in the layout's dtype, contiguous.

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
        shape = (layout.layers, 2, layout.kv_heads, layout.block_size, layout.head_dim)
        dtype = DTYPES[layout.dtype]
        count = needed // dtype.itemsize
        self.layout = layout
        self.blocks = blocks
        self.kv = torch.frombuffer(buffer, dtype=dtype, count=count).view(blocks, *shape)
