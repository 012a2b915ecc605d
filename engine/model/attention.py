"""What a model asks of attention, and where the tokens of a step lie: shared by all backends.

The pool belongs to the engine thread while a step runs; a step writes the K/V of its own tokens
first and then reads whole contexts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from core.ids import BlockId


class Attention(Protocol):
    """Attention over everything the tokens of one step may see; remembers their K and V."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [T, heads, head_dim], key and value [T, kv_heads, head_dim], rotated.

        Returns [T, heads, head_dim].  Layers are called in order, each once per step.  Reach and
        scale are the layer's own (`ModelConfig.windows`, `ModelConfig.scale`): with a window w,
        position p sees p - w + 1 to p, without (0) all from 0 to p.
        """
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """`queries` consecutive positions of one sequence, from `start`, at rows from `first_row`.

    block_ids: its block table, which covers positions 0 to start + queries - 1.
    """

    first_row: int
    queries: int
    start: int
    block_ids: tuple[BlockId, ...]

    @property
    def end(self) -> int:
        return self.start + self.queries

    @property
    def end_row(self) -> int:
        return self.first_row + self.queries

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.end_row)


@dataclass(frozen=True, slots=True)
class StepContext:
    """Spans in the order of their rows, which they cover without gaps.

    block_ids, offsets [T] int64: the cell of the pool that each row's K and V belong in.
    """

    spans: tuple[Span, ...]
    block_ids: Tensor
    offsets: Tensor


def select(context: StepContext, spans: Sequence[int]) -> tuple[Tensor, StepContext]:
    """Some spans, by number, as a context of their own, and the rows [R] int64 they had."""
    chosen = [context.spans[i] for i in spans]
    numbers = [row for span in chosen for row in range(span.first_row, span.end_row)]
    rows = torch.tensor(numbers, dtype=torch.int64).to(context.offsets.device)
    firsts = accumulate((span.queries for span in chosen), initial=0)
    moved = tuple(replace(span, first_row=at) for span, at in zip(chosen, firsts, strict=False))
    return rows, StepContext(moved, context.block_ids[rows], context.offsets[rows])
