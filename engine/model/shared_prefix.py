"""Shared-prefix attention: what several sequences begin with is attended over once.

Hydragen (Juravsky et al. 2024, arXiv:2402.05099): the queries of a group against the shared
blocks are one matrix product, each against the rest of its own context another, and the two
softmax sums are merged by their greatest scores.  The same up to rounding as attending over the
whole context.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from core.ids import BlockId
from engine.model.attention import Attention, Span, StepContext, select
from engine.model.config import ModelConfig
from engine.model.paged import PagedAttention, remember
from engine.model.pages import Group, Pages
from engine.model.prefix_groups import PrefixGroup, prefix_groups

WORTH_TOKENS = 2048
"""A group pays from this many positions on that need not be read again (docs/scheduling.md)."""
_PIECE = 1024
"""Positions of the shared blocks whose scores are held at a time."""


def share_prefixes(kv: Tensor, context: StepContext, config: ModelConfig) -> Attention:
    """Attention of one step over the pool: the plain kind where nothing is worth sharing."""
    size = kv.shape[4]
    decodes = [i for i, span in enumerate(context.spans) if span.queries == 1]
    before = [context.spans[i].block_ids[: context.spans[i].start // size] for i in decodes]
    found = prefix_groups(before, -(-WORTH_TOKENS // size))
    if not found or all(config.windows):
        return PagedAttention(kv, context, config.windows, config.scale)
    groups = [PrefixGroup(tuple(decodes[m] for m in g.members), g.prefix) for g in found]
    return SharedPrefixAttention(kv, context, config, groups)


@dataclass(frozen=True, slots=True)
class _Sharing:
    """rows [n] int64: those of the members.  shared: the common blocks as one context.
    rests: what follows them; their rows count from 0 to n - 1."""

    rows: Tensor
    shared: Group
    rests: list[Group]


class _Sums(NamedTuple):
    """Softmax under way: weights @ values [..., Q, head_dim] and the weights' total [..., Q, 1],
    relative to the greatest score [..., Q, 1]."""

    values: Tensor
    total: Tensor
    greatest: Tensor


class SharedPrefixAttention:
    """kv: the pool, as `Pages` takes it.  Computes in float32.

    What is in no group, and layers whose window does not see the whole prefix, have the plain kind.
    """

    def __init__(
        self,
        kv: Tensor,
        context: StepContext,
        config: ModelConfig,
        groups: Sequence[PrefixGroup[BlockId]],
    ) -> None:
        """groups: members are numbers of spans."""
        self._kv = kv
        self._config = config
        self._pages = Pages(kv)
        self._sharings = [self._sharing(context, group) for group in groups]
        grouped = [m for group in groups for m in group.members]
        others = sorted(set(range(len(context.spans))) - set(grouped))
        self._grouped = select(context, grouped)
        self._other_rows, rest = select(context, others)
        self._others = self._plain(rest) if others else None
        self._windowed = self._plain(context) if any(config.windows) else None

    def _plain(self, context: StepContext) -> PagedAttention:
        return PagedAttention(self._kv, context, self._config.windows, self._config.scale)

    def _sharing(self, context: StepContext, group: PrefixGroup[BlockId]) -> _Sharing:
        spans = [context.spans[m] for m in group.members]
        past, size = len(group.prefix), self._kv.shape[4]
        rests = [
            Span(i, 1, span.start - past * size, span.block_ids[past:])
            for i, span in enumerate(spans)
        ]
        return _Sharing(
            rows=select(context, group.members)[0],
            shared=self._pages.group([Span(0, 1, past * size - 1, group.prefix)], {0}),
            rests=self._pages.groups(rests, {0}),
        )

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self._windowed is not None and self._config.windows[layer]:
            return self._windowed(layer, query, key, value)
        rows, context = self._grouped
        remember(self._kv, layer, context, key[rows], value[rows])
        out = torch.empty_like(query)
        if self._others is not None:
            at = self._other_rows
            out[at] = self._others(layer, query[at], key[at], value[at])
        for sharing in self._sharings:
            out[sharing.rows] = self._attend(layer, query[sharing.rows], sharing).to(out.dtype)
        return out

    def _attend(self, layer: int, query: Tensor, sharing: _Sharing) -> Tensor:
        """[n, heads, head_dim] -> the same."""
        count, _, head_dim = query.shape
        query = query.float() * self._config.scale
        query = query.reshape(count, self._kv.shape[3], -1, head_dim)
        first = self._over_shared(layer, query, sharing.shared)
        out = torch.empty_like(query)
        for rest in sharing.rests:
            key, value = self._pages.gather(layer, rest).float()
            sums = _sums(query[rest.rows], key, value, rest.masks[0])
            values, total, _ = _merge(_Sums(*(x[rest.rows] for x in first)), sums)
            out[rest.rows] = values / total
        return out.flatten(1, 2)

    def _over_shared(self, layer: int, query: Tensor, shared: Group) -> _Sums:
        """query [n, kv_heads, heads / kv_heads, head_dim]: of each KV head one matrix."""
        count, kv_heads, per_head, head_dim = query.shape
        rows = query.transpose(0, 1).reshape(kv_heads, count * per_head, head_dim)
        keys, values = self._pages.gather(layer, shared)[:, 0].float()
        pieces = zip(keys.split(_PIECE, dim=1), values.split(_PIECE, dim=1), strict=True)
        sums = reduce(_merge, (_sums(rows, key, value) for key, value in pieces))
        apart = (x.view(kv_heads, count, per_head, -1).transpose(0, 1) for x in sums)
        return _Sums(*apart)


def _sums(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> _Sums:
    """query [..., Q, head_dim], scaled, over all positions that the mask leaves."""
    scores = query @ key.transpose(-1, -2)
    if mask is not None:
        scores += mask
    greatest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(greatest).exp_()
    return _Sums(weights @ value, weights.sum(-1, keepdim=True), greatest)


def _merge(a: _Sums, b: _Sums) -> _Sums:
    """Over the positions of both (Milakov and Gimelshein, arXiv:1805.02867)."""
    greatest = torch.maximum(a.greatest, b.greatest)
    of_a, of_b = (a.greatest - greatest).exp(), (b.greatest - greatest).exp()
    return _Sums(a.values * of_a + b.values * of_b, a.total * of_a + b.total * of_b, greatest)
