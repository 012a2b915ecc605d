"""`engine.model.attention.Attention` by the kernels of this folder."""

from collections.abc import Sequence
from ctypes import byref

import torch
from torch import Tensor

from engine.model.attention import StepContext
from engine.native.library import Context, Library


class NativeAttention:
    """For one step.  kv: the pool, [blocks, layers, 2, kv_heads, block_size, head_dim] in float32
    or bfloat16.  A page (one block of one head's K or V) is contiguous, the rest may be strided.

    Computes in float32.  What a row gets depends on its own span alone, not on the other spans or
    on the number of threads.
    """

    def __init__(
        self,
        library: Library,
        kv: Tensor,
        context: StepContext,
        windows: Sequence[int],
        scale: float,
        threads: int,
    ) -> None:
        """windows: per layer, 0 for unlimited reach.  Raises ValueError for a pool it cannot
        read."""
        size, head_dim = kv.shape[4:]
        if kv.stride()[4:] != (head_dim, 1) or kv.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"a {kv.dtype} KV pool with strides {kv.stride()} has no whole pages")
        self._library = library
        self._windows = windows
        self._threads = threads
        self._head_dim = head_dim
        spans = context.spans
        width = max(len(span.block_ids) for span in spans)
        works = [(span.first_row, span.queries, span.start) for span in spans]
        tables = [span.block_ids + (0,) * (width - len(span.block_ids)) for span in spans]
        self._kept = (kv, torch.tensor(works), torch.tensor(tables))
        self._context = Context(
            kv=kv.data_ptr(),
            bfloat16=kv.dtype == torch.bfloat16,
            strides=kv.stride()[:4],
            kv_heads=kv.shape[3],
            block_size=size,
            head_dim=head_dim,
            works=self._kept[1].data_ptr(),
            count=len(spans),
            tables=self._kept[2].data_ptr(),
            table_stride=width,
            scale=scale,
        )

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (self._rows(x) for x in (query, key, value))
        out = query.new_empty(query.shape)
        self._library.attention(
            byref(self._context),
            query.shape[1],
            layer,
            self._windows[layer],
            *(number for x in (query, key, value) for number in (x.data_ptr(), x.stride(0))),
            out.data_ptr(),
            self._threads,
        )
        return out

    def _rows(self, x: Tensor) -> Tensor:
        """float32, the heads of a row side by side."""
        if x.dtype is not torch.float32:
            x = x.float()
        return x if x.stride()[1:] == (self._head_dim, 1) else x.contiguous()
