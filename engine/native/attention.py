"""`engine.model.attention.Attention` by the kernels of this folder."""

from collections.abc import Sequence
from ctypes import byref
from math import lcm

import torch
from torch import Tensor

from core.ids import BlockId
from engine.model.attention import Span, StepContext
from engine.model.prefix_groups import prefix_groups
from engine.native.library import Context, Library


class NativeAttention:
    """For one step.  kv: the pool, [blocks, layers, 2, kv_heads, block_size, head_dim] in float32
    or bfloat16.  A page (one block of one head's K or V) is contiguous, the rest may be strided.

    Computes in float32.  What a row gets depends on its own span alone, not on the other spans or
    on the number of threads.  A prefix that decodes share is read once.
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
        sharings, members = sharings_of(spans, size, library.segment)
        self._kept = (kv, *map(torch.tensor, (works, tables, sharings, members)))
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
            sharings=self._kept[3].data_ptr(),
            sharing_count=len(sharings),
            members=self._kept[4].data_ptr(),
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


def sharings_of(
    spans: Sequence[Span], block_size: int, segment: int
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """(first of its members, how many, segments in common) of each group of decodes that begin
    with the same blocks, and the members: numbers of spans."""
    run = lcm(block_size, segment) // block_size
    decodes = [i for i, span in enumerate(spans) if span.queries == 1]
    runs = [_runs(spans[i].block_ids[: spans[i].start // block_size], run) for i in decodes]
    sharings: list[tuple[int, int, int]] = []
    members: list[int] = []
    for group in prefix_groups(runs):
        segments = len(group.prefix) * run * block_size // segment
        sharings.append((len(members), len(group.members), segments))
        members += [decodes[m] for m in group.members]
    return sharings, members


def _runs(blocks: tuple[BlockId, ...], length: int) -> tuple[tuple[BlockId, ...], ...]:
    """Cut into whole runs; what is left over is left out."""
    return tuple(blocks[at : at + length] for at in range(0, len(blocks) - length + 1, length))
