"""What a model asks of attention, and the plain-torch answer over a paged KV pool.

The pool belongs to the engine thread while a step runs; a step writes the K/V of its own tokens
first and then reads whole contexts.  All indices are made once per step (`engine.device.batch`);
a layer only adds its offset to them.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Attention(Protocol):
    """Attention over everything the tokens of one step may see; remembers their K and V."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [T, heads, head_dim], key and value [T, kv_heads, head_dim], rotated.

        Returns [T, heads, head_dim].  Layers are called in order, each once per step.
        """
        ...


@dataclass(frozen=True, slots=True)
class Group:
    """`sequences` works of `queries` tokens each, at consecutive rows from `first_row`, whose
    contexts are padded to a common `width` of whole blocks.  int64 indices, of layer 0:

    pages   [2 * sequences * kv_heads * blocks]: (K or V, sequence, head, block) -> row of the pool
            seen as [rows, block_size * head_dim]
    padding cells of the gathered context, seen as [2 * sequences * kv_heads * width, head_dim],
            that hold no token of the sequence
    mask    [sequences, 1, queries, width], in the pool's dtype: 0 to see a position, else -inf
    """

    first_row: int
    sequences: int
    queries: int
    width: int
    pages: Tensor
    padding: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class StepContext:
    """Where the T tokens of a step are written (block_ids, offsets [T], int64), what they see."""

    block_ids: Tensor
    offsets: Tensor
    groups: tuple[Group, ...]


class PagedAttention:
    """Gather by block table, then one SDPA per group; any number of works of one token is a few
    groups.  kv: the pool, [blocks, layers, 2, kv_heads, block_size, head_dim], contiguous."""

    def __init__(self, kv: Tensor, context: StepContext) -> None:
        self._kv = kv
        self._context = context
        self._kv_heads, self._head_dim = kv.shape[3], kv.shape[5]
        self._pages = kv.view(-1, kv.shape[4] * kv.shape[5])

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        at = self._context
        self._kv[:, layer, 0][at.block_ids, :, at.offsets] = key
        self._kv[:, layer, 1][at.block_ids, :, at.offsets] = value
        return torch.cat([self._attend(layer, query, group) for group in at.groups])

    def _attend(self, layer: int, query: Tensor, group: Group) -> Tensor:
        rows = group.sequences * group.queries
        query = query[group.first_row : group.first_row + rows]
        query = query.view(group.sequences, group.queries, *query.shape[1:]).transpose(1, 2)
        key, value = self._gather(layer, group)
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=group.mask, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)

    def _gather(self, layer: int, group: Group) -> Tensor:
        """[2 (K, V), sequences, kv_heads, width, head_dim], a copy."""
        pages = self._pages.index_select(0, group.pages + layer * 2 * self._kv_heads)
        # A masked cell still takes part as 0 * V, and whatever lies in a block's unwritten
        # tail may be NaN.
        pages.view(-1, self._head_dim).index_fill_(0, group.padding, 0.0)
        return pages.view(2, group.sequences, self._kv_heads, group.width, self._head_dim)
