"""A plan as tensors: the only code that maps positions to places in the KV pool.

Everything that is the same for all layers is computed here, once per step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.errors import InternalError, Stage
from core.kvlayout import KVLayout
from engine.device.pool import DTYPES
from engine.model.attention import Group, StepContext
from engine.policy.plan import Plan, SampleAt, Work

GROUP_COST_TOKENS = 512
"""One more group costs about as much as attending over this many positions of padding."""


@dataclass(frozen=True, slots=True)
class Batch:
    """token_ids, positions [T]; sample_rows [S]: rows whose logits are wanted (int64).

    asks [S]: how to sample them; sampled [S]: the works of the plan that they belong to.
    Rows are in the order of the groups, not of the plan.
    """

    token_ids: Tensor
    positions: Tensor
    context: StepContext
    sample_rows: Tensor
    asks: tuple[SampleAt, ...]
    sampled: tuple[int, ...]


def build_batch(plan: Plan, layout: KVLayout) -> Batch:
    """Raises InternalError for a work that is empty or whose block table is too short."""
    for work in plan.works:
        _check(work, layout)
    parts = partition(plan.works, layout)
    order = [i for part in parts for i in part]
    works = [plan.works[i] for i in order]
    cells = [(w, p) for w in works for p in range(w.start, _end(w))]
    size = layout.block_size
    context = StepContext(
        block_ids=torch.tensor([w.block_ids[p // size] for w, p in cells]),
        offsets=torch.tensor([p % size for _, p in cells]),
        groups=_groups([[plan.works[i] for i in part] for part in parts], layout),
    )
    rows = torch.tensor([len(w.token_ids) for w in works]).cumsum(0) - 1
    return Batch(
        token_ids=torch.tensor([t for w in works for t in w.token_ids]),
        positions=torch.tensor([p for _, p in cells]),
        context=context,
        sample_rows=rows[torch.tensor([w.sample is not None for w in works])],
        asks=tuple(w.sample for w in works if w.sample is not None),
        sampled=tuple(i for i in order if plan.works[i].sample is not None),
    )


def partition(works: Sequence[Work], layout: KVLayout) -> list[list[int]]:
    """Indices of the works that attend together: works of one token by falling context length,
    a new part where padding would cost more than a part does; every longer work alone."""
    blocks = [layout.blocks_for(_end(w)) for w in works]
    decodes = [i for i, w in enumerate(works) if len(w.token_ids) == 1]
    parts: list[list[int]] = []
    padding = 0
    for i in sorted(decodes, key=lambda i: -blocks[i]):
        padding += (blocks[parts[-1][0]] - blocks[i]) * layout.block_size if parts else 0
        if not parts or padding > GROUP_COST_TOKENS:
            parts.append([])
            padding = 0
        parts[-1].append(i)
    return parts + [[i] for i, w in enumerate(works) if len(w.token_ids) > 1]


def _groups(parts: list[list[Work]], layout: KVLayout) -> tuple[Group, ...]:
    groups: list[Group] = []
    row = 0
    for works in parts:
        groups.append(_group(works, row, layout))
        row += sum(len(w.token_ids) for w in works)
    return tuple(groups)


def _group(works: list[Work], first_row: int, layout: KVLayout) -> Group:
    count, queries = len(works), len(works[0].token_ids)
    blocks = max(layout.blocks_for(_end(w)) for w in works)
    width = blocks * layout.block_size
    starts = torch.tensor([w.start for w in works])
    seen = torch.arange(width) <= (starts[:, None] + torch.arange(queries))[..., None]
    empty = torch.arange(width) >= starts[:, None] + queries
    padding = empty[None, :, None].expand(2, count, layout.kv_heads, width)
    mask = torch.zeros(count, 1, queries, width, dtype=DTYPES[layout.dtype])
    return Group(
        first_row=first_row,
        sequences=count,
        queries=queries,
        width=width,
        pages=_pages(torch.tensor([_table(w, blocks) for w in works]), layout),
        padding=padding.flatten().nonzero().squeeze(1),
        mask=mask.masked_fill_(~seen[:, None], float("-inf")),
    )


def _pages(table: Tensor, layout: KVLayout) -> Tensor:
    """Block table [sequences, blocks] -> `Group.pages`."""
    heads = torch.arange(layout.kv_heads)[:, None]
    kinds = torch.arange(2)[:, None, None, None]
    return ((table[:, None] * layout.layers * 2 + kinds) * layout.kv_heads + heads).flatten()


def _table(work: Work, blocks: int) -> list[int]:
    """The first `blocks` entries; a shorter table is padded with a block of its own."""
    own = work.block_ids[:blocks]
    return [*own, *own[:1] * (blocks - len(own))]


def _end(work: Work) -> int:
    return work.start + len(work.token_ids)


def _check(work: Work, layout: KVLayout) -> None:
    if not work.token_ids or len(work.block_ids) < layout.blocks_for(_end(work)):
        raise InternalError(
            f"work of {work.key}: {len(work.token_ids)} tokens from position {work.start} with"
            f" {len(work.block_ids)} blocks of {layout.block_size}; the scheduler must plan at"
            " least one token and allocate blocks for all",
            stage=Stage.DECODE,
        )
