"""Contexts gathered out of the paged KV pool, for attention in plain torch on any device.

All indices are made once per step; a layer only adds its offset to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.attention import Span

GROUP_COST_TOKENS = 512
"""One more group costs about as much as attending over this many positions of padding."""


@dataclass(frozen=True, slots=True)
class Group:
    """`sequences` spans of `queries` rows each, whose contexts are padded to a common `width` of
    whole blocks.  int64 indices, of layer 0:

    rows    [sequences * queries]
    pages   [2 * sequences * kv_heads * blocks]: (K or V, sequence, head, block) -> row of the pool
            seen as [rows, block_size * head_dim]
    padding cells of the gathered context, seen as [2 * sequences * kv_heads * width, head_dim],
            that hold no token of the sequence
    masks   by window: [sequences, 1, queries, width], in the pool's dtype: 0 to see, else -inf
    """

    sequences: int
    queries: int
    width: int
    rows: Tensor
    pages: Tensor
    padding: Tensor
    masks: dict[int, Tensor]


class Pages:
    """kv: the pool, [blocks, layers, 2, kv_heads, block_size, head_dim], or some heads of it.  A
    page (one block of one head's K or V) is contiguous; all other strides are whole pages."""

    def __init__(self, kv: Tensor) -> None:
        self._kv = kv
        self._kv_heads, self._block_size, self._head_dim = kv.shape[3:]
        page = self._block_size * self._head_dim
        strides = [stride // page for stride in kv.stride()[:4]]
        self._of_block, self._of_layer, self._of_kind, self._of_head = strides
        last = sum((n - 1) * stride for n, stride in zip(kv.shape[:4], strides, strict=True))
        self._pages = kv.as_strided((last + 1, page), (page, 1))

    def groups(self, spans: Sequence[Span], windows: set[int]) -> list[Group]:
        """The spans by what `partition` puts together."""
        parts = partition(spans, self._block_size)
        return [self.group([spans[i] for i in part], windows) for part in parts]

    def group(self, spans: Sequence[Span], windows: set[int]) -> Group:
        """spans: of equally many rows."""
        count, queries, device = len(spans), spans[0].queries, self._kv.device
        blocks = max(-(-span.end // self._block_size) for span in spans)
        width = blocks * self._block_size
        starts = torch.tensor([span.start for span in spans])
        own = starts[:, None] + torch.arange(queries)
        empty = torch.arange(width) >= starts[:, None] + queries
        padding = empty[None, :, None].expand(2, count, self._kv_heads, width)
        first_rows = torch.tensor([span.first_row for span in spans])
        return Group(
            sequences=count,
            queries=queries,
            width=width,
            rows=(first_rows[:, None] + torch.arange(queries)).flatten().to(device),
            pages=self._indices(torch.tensor([_table(s, blocks) for s in spans])).to(device),
            padding=padding.flatten().nonzero().squeeze(1).to(device),
            masks={w: _mask(own, width, w, self._kv.dtype).to(device) for w in windows},
        )

    def gather(self, layer: int, group: Group) -> Tensor:
        """[2 (K, V), sequences, kv_heads, width, head_dim], a copy."""
        pages = self._pages.index_select(0, group.pages + layer * self._of_layer)
        # A masked cell still takes part as 0 * V, and whatever lies in a block's unwritten
        # tail may be NaN.
        pages.view(-1, self._head_dim).index_fill_(0, group.padding, 0.0)
        return pages.view(2, group.sequences, self._kv_heads, group.width, self._head_dim)

    def _indices(self, table: Tensor) -> Tensor:
        """Block table [sequences, blocks] -> `Group.pages`."""
        heads = torch.arange(self._kv_heads)[:, None] * self._of_head
        kinds = torch.arange(2)[:, None, None, None] * self._of_kind
        return (table[:, None] * self._of_block + kinds + heads).flatten()


def partition(spans: Sequence[Span], block_size: int) -> list[list[int]]:
    """Indices of the spans that attend together: spans of one row by falling context length, a
    new part where padding would cost more than a part does; every longer span alone."""
    blocks = [-(-span.end // block_size) for span in spans]
    decodes = [i for i, span in enumerate(spans) if span.queries == 1]
    parts: list[list[int]] = []
    padding = 0
    for i in sorted(decodes, key=lambda i: -blocks[i]):
        padding += (blocks[parts[-1][0]] - blocks[i]) * block_size if parts else 0
        if not parts or padding > GROUP_COST_TOKENS:
            parts.append([])
            padding = 0
        parts[-1].append(i)
    return parts + [[i] for i, span in enumerate(spans) if span.queries > 1]


def _mask(own: Tensor, width: int, window: int, dtype: torch.dtype) -> Tensor:
    """own [sequences, queries]: position of each row."""
    behind = own[..., None] - torch.arange(width)
    seen = (behind >= 0) & (behind < window) if window else behind >= 0
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
    return mask[:, None]


def _table(span: Span, blocks: int) -> list[int]:
    """The first `blocks` entries; a shorter table is padded with a block of its own."""
    own = span.block_ids[:blocks]
    return [*own, *own[:1] * (blocks - len(own))]
