"""Attention in plain torch over the paged KV pool: gather by block table, then one SDPA per group
of spans."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.attention import StepContext
from engine.model.pages import Group, Pages


class PagedAttention:
    """kv: the pool, as `Pages` takes it."""

    def __init__(
        self, kv: Tensor, context: StepContext, windows: Sequence[int], scale: float
    ) -> None:
        """windows: per layer, 0 for unlimited reach."""
        self._kv = kv
        self._context = context
        self._windows = windows
        self._scale = scale
        self._pages = Pages(kv)
        self._groups = self._pages.groups(context.spans, set(windows))

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        remember(self._kv, layer, self._context, key, value)
        out = torch.empty_like(query)
        for group in self._groups:
            out[group.rows] = self._attend(layer, query[group.rows], group)
        return out

    def _attend(self, layer: int, query: Tensor, group: Group) -> Tensor:
        query = query.view(group.sequences, group.queries, *query.shape[1:]).transpose(1, 2)
        key, value = self._pages.gather(layer, group)
        mask = group.masks[self._windows[layer]]
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=self._scale, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)


def remember(kv: Tensor, layer: int, context: StepContext, key: Tensor, value: Tensor) -> None:
    """Write key and value [T, kv_heads, head_dim] into the cells of the context."""
    kv[:, layer, 0][context.block_ids, :, context.offsets] = key
    kv[:, layer, 1][context.block_ids, :, context.offsets] = value
