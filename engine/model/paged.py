"""Attention in plain torch over the paged KV pool, on any device.

Gather by block table, then one SDPA per group of spans.  All indices are made once per step; a
layer only adds its offset to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.attention import Span, StepContext

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


class PagedAttention:
    """kv: the pool, [blocks, layers, 2, kv_heads, block_size, head_dim].  A page (one block of
    one head's K or V) is contiguous; all other strides are whole pages, so that it may be the
    part of a pool that holds the heads of one tensor-parallel rank."""

    def __init__(
        self, kv: Tensor, context: StepContext, windows: Sequence[int], scale: float
    ) -> None:
        """windows: per layer, 0 for unlimited reach."""
        self._kv = kv
        self._context = context
        self._windows = windows
        self._scale = scale
        self._kv_heads, self._head_dim = kv.shape[3], kv.shape[5]
        self._pages = _pages_of(kv)
        self._pages_per_layer = _page_strides(kv)[1]
        spans = [[context.spans[i] for i in part] for part in partition(context.spans, kv.shape[4])]
        self._groups = [_group(part, kv, set(windows)) for part in spans]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        at = self._context
        self._kv[:, layer, 0][at.block_ids, :, at.offsets] = key
        self._kv[:, layer, 1][at.block_ids, :, at.offsets] = value
        out = torch.empty_like(query)
        for group in self._groups:
            out[group.rows] = self._attend(layer, query[group.rows], group)
        return out

    def _attend(self, layer: int, query: Tensor, group: Group) -> Tensor:
        query = query.view(group.sequences, group.queries, *query.shape[1:]).transpose(1, 2)
        key, value = self._gather(layer, group)
        mask = group.masks[self._windows[layer]]
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=self._scale, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)

    def _gather(self, layer: int, group: Group) -> Tensor:
        """[2 (K, V), sequences, kv_heads, width, head_dim], a copy."""
        pages = self._pages.index_select(0, group.pages + layer * self._pages_per_layer)
        # A masked cell still takes part as 0 * V, and whatever lies in a block's unwritten
        # tail may be NaN.
        pages.view(-1, self._head_dim).index_fill_(0, group.padding, 0.0)
        return pages.view(2, group.sequences, self._kv_heads, group.width, self._head_dim)


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


def _pages_of(kv: Tensor) -> Tensor:
    """From the first page of `kv` to its last, what lies between them included:
    [pages, block_size * head_dim]."""
    page = kv.shape[4] * kv.shape[5]
    strides = _page_strides(kv)
    last = sum((n - 1) * stride for n, stride in zip(kv.shape, strides, strict=False))
    return kv.as_strided((last + 1, page), (page, 1))


def _page_strides(kv: Tensor) -> tuple[int, ...]:
    """Pages from one block, layer, K or V, and head to the next."""
    page = kv.shape[4] * kv.shape[5]
    return tuple(stride // page for stride in kv.stride()[:4])


def _group(spans: list[Span], kv: Tensor, windows: set[int]) -> Group:
    count, queries, size = len(spans), spans[0].queries, kv.shape[4]
    blocks = max(-(-span.end // size) for span in spans)
    width = blocks * size
    starts = torch.tensor([span.start for span in spans])
    own = starts[:, None] + torch.arange(queries)
    empty = torch.arange(width) >= starts[:, None] + queries
    padding = empty[None, :, None].expand(2, count, kv.shape[3], width)
    first_rows = torch.tensor([span.first_row for span in spans])
    return Group(
        sequences=count,
        queries=queries,
        width=width,
        rows=(first_rows[:, None] + torch.arange(queries)).flatten().to(kv.device),
        pages=_pages(torch.tensor([_table(span, blocks) for span in spans]), kv).to(kv.device),
        padding=padding.flatten().nonzero().squeeze(1).to(kv.device),
        masks={window: _mask(own, width, window, kv) for window in windows},
    )


def _mask(own: Tensor, width: int, window: int, kv: Tensor) -> Tensor:
    """own [sequences, queries]: position of each row."""
    behind = own[..., None] - torch.arange(width)
    seen = (behind >= 0) & (behind < window) if window else behind >= 0
    mask = torch.zeros(seen.shape, dtype=kv.dtype).masked_fill_(~seen, float("-inf"))
    return mask[:, None].to(kv.device)


def _pages(table: Tensor, kv: Tensor) -> Tensor:
    """Block table [sequences, blocks] -> `Group.pages`."""
    per_block, _, per_kind, per_head = _page_strides(kv)
    heads = torch.arange(kv.shape[3])[:, None] * per_head
    kinds = torch.arange(2)[:, None, None, None] * per_kind
    return (table[:, None] * per_block + kinds + heads).flatten()


def _table(span: Span, blocks: int) -> list[int]:
    """The first `blocks` entries; a shorter table is padded with a block of its own."""
    own = span.block_ids[:blocks]
    return [*own, *own[:1] * (blocks - len(own))]
