"""Counts router choices per block of the KV pool, behind the KV of the tokens that made them.

So a prefix hit, a hand-over or a preemption takes the counts along with the KV and they stay
exact: the counts of a context are the sum over its blocks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from core.ids import BlockId
from engine.model.attention import StepContext


class ExpertLog:
    """`engine.model.decoder.ExpertLog` of one step, of all MoE layers or of consecutive ones.

    Nothing is written before `store`: a step that fails leaves the counters as they were.
    """

    def __init__(self) -> None:
        self._chosen: list[Tensor] = []

    def __call__(self, chosen: Tensor) -> None:
        self._chosen.append(chosen)

    def store(self, counts: Tensor, context: StepContext, experts: int, first: int = 0) -> None:
        """Add to counts [blocks, MoE layers * experts] int16, a view of the pool.

        first: which MoE layer the first call was of.  A block whose first position this step
        computes has new content: it starts from zero.  No counter exceeds block_size * top_k.
        """
        layers = torch.stack(self._chosen, dim=1)  # [T, layers, k]
        index = torch.arange(first, first + layers.shape[1], device=layers.device)
        cells = (layers + index[:, None] * experts).flatten(1)
        fresh = context.block_ids[context.offsets == 0]
        counts[fresh, first * experts : (first + layers.shape[1]) * experts] = 0
        ones = torch.ones((), dtype=counts.dtype, device=counts.device).expand(cells.shape)
        counts.index_put_((context.block_ids[:, None], cells), ones, accumulate=True)


def context_counts(counts: Tensor, block_ids: Sequence[BlockId]) -> tuple[int, ...]:
    """[MoE layers * experts]: how often the tokens in these blocks chose each expert."""
    total: list[int] = counts[list(block_ids)].sum(0, dtype=torch.int64).tolist()
    return tuple(total)
