"""A plan as tensors: the only code that maps positions to places in the KV pool.

Everything that is the same for all layers is computed here, once per step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.errors import InternalError, Stage
from core.kvlayout import KVLayout
from engine.model.attention import Span, StepContext, select
from engine.policy.plan import Plan, SampleAt, Work


@dataclass(frozen=True, slots=True)
class Batch:
    """token_ids, positions [T]; sample_rows [S]: rows whose logits are wanted (int64).

    Rows are in the order of the plan.  asks [S]: how to sample them; sampled [S]: the works of
    the plan that they belong to.
    """

    token_ids: Tensor
    positions: Tensor
    context: StepContext
    sample_rows: Tensor
    asks: tuple[SampleAt, ...]
    sampled: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Some works of a batch.  rows [R] int64: theirs; positions and context: of these rows."""

    rows: Tensor | slice
    positions: Tensor
    context: StepContext


def build_batch(plan: Plan, layout: KVLayout, device: torch.device | str = "cpu") -> Batch:
    """Raises InternalError for a work that is empty or whose block table is too short."""
    spans: list[Span] = []
    sampled: list[int] = []
    rows = 0
    for index, work in enumerate(plan.works):
        _check(work, layout)
        spans.append(Span(rows, len(work.token_ids), work.start, work.block_ids))
        rows += len(work.token_ids)
        if work.sample is not None:
            sampled.append(index)
    size = layout.block_size
    cells = [(span, p) for span in spans for p in range(span.start, span.end)]

    def whole(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)

    context = StepContext(
        spans=tuple(spans),
        block_ids=whole([span.block_ids[p // size] for span, p in cells]),
        offsets=whole([p % size for _, p in cells]),
    )
    return Batch(
        token_ids=whole([t for w in plan.works for t in w.token_ids]),
        positions=whole([p for _, p in cells]),
        context=context,
        sample_rows=whole([spans[i].first_row + spans[i].queries - 1 for i in sampled]),
        asks=tuple(w.sample for w in plan.works if w.sample is not None),
        sampled=tuple(sampled),
    )


def part_of(batch: Batch, works: Sequence[int]) -> Part:
    """works: by their number in the plan, rising."""
    if len(works) == len(batch.context.spans):
        return Part(slice(None), batch.positions, batch.context)
    rows, context = select(batch.context, works)
    return Part(rows, batch.positions[rows], context)


def _check(work: Work, layout: KVLayout) -> None:
    end = work.start + len(work.token_ids)
    if not work.token_ids or len(work.block_ids) < layout.blocks_for(end):
        raise InternalError(
            f"work of {work.key}: {len(work.token_ids)} tokens from position {work.start} with"
            f" {len(work.block_ids)} blocks of {layout.block_size}; the scheduler must plan at"
            " least one token and allocate blocks for all",
            stage=Stage.DECODE,
        )
