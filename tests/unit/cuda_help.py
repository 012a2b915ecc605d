"""What stands in for a GPU on a CPU, and steps over a paged pool for attention backends."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core.ids import BlockId
from engine.model.attention import Attention, Span, StepContext

BLOCKS, SIZE, HEADS, KV_HEADS, DIM = 30, 16, 4, 2, 16
TRAILER = 3
SPANS = ((1, 0), (1, 39), (1, 5), (1, 16), (1, 0))
MIXED = ((1, 20), (30, 5), (1, 0), (70, 0), (1, 15), (16, 16))


def attend(*args: Any, **how: Any) -> Tensor:
    """FlexAttention as its mathematics are written, without a compiler."""
    with patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True):
        return flex_attention.flex_attention(*args, **how)


class Tape(TorchDispatchMode):
    """Torch's operations in order, with the tensors they read and gave."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def record(body: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`engine.device.graphs.Record`, with what matters of CUDA graphs: a replay does no Python,
    reads what lies in the tensors that the recording read, and writes to those that it wrote."""
    with Tape() as tape:
        out = body()

    def replay() -> Tensor:
        tape.replay()
        return out

    return replay


@dataclass
class Step:
    """Rows of several sequences over one pool, scattered over its blocks; the first block of all
    whose first is computed already is one and the same."""

    kv: Tensor
    context: StepContext
    query: Tensor
    key: Tensor
    value: Tensor

    @staticmethod
    def of(
        shape: tuple[tuple[int, int], ...], layers: int = 2, seed: int = 0, head_dim: int = DIM
    ) -> "Step":
        """shape: (rows, first position) of each sequence."""
        torch.manual_seed(seed)
        block, page = layers * 2 * KV_HEADS * SIZE * head_dim, SIZE * head_dim
        kv = torch.randn(BLOCKS, block + TRAILER * page)[:, :block]
        kv = kv.view(BLOCKS, layers, 2, KV_HEADS, SIZE, head_dim)
        spans, row = [], 0
        free = torch.randperm(BLOCKS).tolist()
        common = BlockId(free.pop())
        for queries, start in shape:
            # Some tables have room for what comes after this step.
            blocks = -(-(start + queries) // SIZE) + start % 2
            table = tuple(BlockId(free.pop()) for _ in range(blocks))
            if start >= SIZE:
                table = (common, *table[1:])
            spans.append(Span(row, queries, start, table))
            row += queries
        cells = [(*divmod(p, SIZE), s) for s in spans for p in range(s.start, s.end)]
        context = StepContext(
            tuple(spans),
            torch.tensor([span.block_ids[block] for block, _, span in cells]),
            torch.tensor([offset for _, offset, _ in cells]),
        )
        # As the model hands them over: slices of one wider tensor.
        rows = torch.randn(row, HEADS + 2 * KV_HEADS, head_dim)
        query, key, value = rows.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        return Step(kv, context, query, key, value)

    def run(self, attention: Attention) -> list[Tensor]:
        """Layer by layer, and the pool afterwards."""
        layers = range(self.kv.shape[1])
        outs = [attention(i, self.query * (i + 1), self.key, self.value) for i in layers]
        return [*outs, self.kv]


def expect(got: list[Tensor], wanted: list[Tensor], atol: float = 1e-5) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=atol, rtol=0)
