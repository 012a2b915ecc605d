"""Paged attention by the compiled kernels equals softmax attention in float64."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from core.ids import BlockId
from engine.model.attention import Span, StepContext
from engine.native.attention import NativeAttention
from tests.unit.native_help import LANES, assert_close, library

LAYERS = 2
Spans = list[tuple[int, int]]
"""(start, queries) of each span."""


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32


class Step:
    """A pool in which everything unwritten is NaN, and the step of some spans over it."""

    def __init__(self, shape: Shape, spans: Spans, windows: tuple[int, ...] = (0, 0)) -> None:
        self.shape, self.windows = shape, windows
        lengths = [start + queries for start, queries in spans]
        needed = [-(-length // shape.block_size) for length in lengths]
        ids = torch.randperm(sum(needed) + 3).tolist()
        size = (len(ids), LAYERS, 2, shape.kv_heads, shape.block_size, shape.head_dim)
        self.kv = torch.full(size, float("nan"), dtype=shape.dtype)
        self.contexts = [
            torch.randn(LAYERS, 2, length, shape.kv_heads, shape.head_dim) for length in lengths
        ]
        made, row = [], 0
        for (start, queries), blocks, context in zip(spans, needed, self.contexts, strict=True):
            own = tuple(BlockId(ids.pop()) for _ in range(blocks))
            made.append(Span(row, queries, start, own))
            row += queries
            self._fill(own, context[:, :, :start])
        self.context = StepContext(tuple(made), torch.empty(0), torch.empty(0))
        self.query = torch.randn(row, shape.heads, shape.head_dim)

    def _fill(self, blocks: tuple[BlockId, ...], context: Tensor) -> None:
        at = torch.arange(context.shape[2])
        ids = torch.tensor(blocks)[at // self.shape.block_size]
        cells = context.permute(2, 0, 1, 3, 4).to(self.kv.dtype)
        self.kv[ids, :, :, :, at % self.shape.block_size] = cells

    def new(self, kind: int, layer: int) -> Tensor:
        """Keys (0) or values (1) of this step, [T, kv_heads, head_dim]."""
        spans = self.context.spans
        return torch.cat(
            [c[layer, kind, s.start :] for c, s in zip(self.contexts, spans, strict=True)]
        )

    def run(
        self, layer: int = 1, lanes: int = 0, threads: int = 1, kv: Tensor | None = None
    ) -> Tensor:
        attention = NativeAttention(
            library(lanes), self.kv if kv is None else kv, self.context, self.windows, 0.3, threads
        )
        return attention(layer, self.query, self.new(0, layer), self.new(1, layer))

    def check(self, got: Tensor, layer: int = 1) -> None:
        for span, context in zip(self.context.spans, self.contexts, strict=True):
            stored = context[layer].to(self.kv.dtype).double()
            query = self.query[span.rows].double() * 0.3
            group = self.shape.heads // self.shape.kv_heads
            key, value = stored.repeat_interleave(group, dim=2)
            scores = torch.einsum("qhd,khd->hqk", query, key)
            behind = torch.arange(span.start, span.end)[:, None] - torch.arange(span.end)
            window = self.windows[layer] or span.end
            scores[:, (behind < 0) | (behind >= window)] = float("-inf")
            weights = scores.softmax(-1)
            want = torch.einsum("hqk,khd->qhd", weights, value)
            assert_close(
                got[span.rows], want, 20 * torch.einsum("hqk,khd->qhd", weights, value.abs())
            )


MIXED: Spans = [(0, 1), (5, 1), (63, 1), (64, 1), (700, 1), (0, 7), (30, 70), (300, 40)]


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("windows", [(0, 0), (0, 1), (0, 5), (0, 100)])
def test_decodes_and_chunks_together(
    windows: tuple[int, ...], dtype: torch.dtype, lanes: int
) -> None:
    step = Step(Shape(dtype=dtype), MIXED, windows)
    step.check(step.run(lanes=lanes))


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("head_dim", [16, 20, 80, 128, 256])
@pytest.mark.parametrize("block_size", [8, 32])
def test_heads_and_blocks_of_other_sizes(block_size: int, head_dim: int, lanes: int) -> None:
    step = Step(Shape(head_dim=head_dim, block_size=block_size), [(0, 33), (77, 1), (300, 2)])
    step.check(step.run(lanes=lanes))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (8, 2), (8, 1), (200, 2)])
def test_any_number_of_query_heads_per_kv_head(heads: int, kv_heads: int) -> None:
    step = Step(Shape(heads=heads, kv_heads=kv_heads, head_dim=16), [(0, 9), (400, 1)])
    step.check(step.run())


def test_a_block_of_one_position() -> None:
    step = Step(Shape(block_size=1), [(90, 3)])
    step.check(step.run())


def test_a_span_does_not_depend_on_the_others_or_on_the_threads() -> None:
    step = Step(Shape(), MIXED, (0, 0))
    together = step.run(threads=2)
    for span, context in zip(step.context.spans, step.contexts, strict=True):
        step.context = StepContext(
            (Span(0, span.queries, span.start, span.block_ids),), torch.empty(0), torch.empty(0)
        )
        step.contexts, query = [context], step.query
        step.query = query[span.rows]
        assert torch.equal(step.run(threads=1), together[span.rows])
        step.query = query


def test_the_step_leaves_its_keys_and_values_in_the_pool_and_nothing_else() -> None:
    step = Step(Shape(dtype=torch.bfloat16), [(20, 5)])
    before = step.kv.clone()
    step.run(layer=1)
    span = step.context.spans[0]
    for kind in (0, 1):
        new = step.new(kind, 1).to(torch.bfloat16)
        for row, position in enumerate(range(span.start, span.end)):
            block, offset = divmod(position, 16)
            cell = step.kv[span.block_ids[block], 1, kind, :, offset]
            assert torch.equal(cell, new[row])
            before[span.block_ids[block], 1, kind, :, offset] = new[row]
    assert torch.equal(step.kv.view(torch.int16), before.view(torch.int16))


def test_the_pool_may_be_a_view_of_a_bigger_one() -> None:
    """Of blocks with a trailer, and of the heads of one tensor-parallel rank."""
    step = Step(Shape(kv_heads=2), MIXED)
    blocks, layers, kinds, heads, size, dim = step.kv.shape
    page = size * dim
    arena = torch.full((blocks, layers * kinds * heads * 2 * page + 40), float("nan"))
    kv = arena.as_strided(
        step.kv.shape,
        (arena.stride(0), kinds * heads * 2 * page, heads * 2 * page, page, dim, 1),
        storage_offset=heads * page,
    )
    kv.copy_(step.kv)
    step.check(step.run(kv=kv))
    assert bool(arena[:, -40:].isnan().all())
    assert bool(arena[:, : heads * page].isnan().all())


def test_queries_keys_and_values_may_be_views_of_one_tensor() -> None:
    step = Step(Shape(), [(100, 1), (0, 50)])
    want = step.run()
    qkv = torch.cat((step.query, step.new(0, 1), step.new(1, 1)), dim=1)
    parts = qkv[:, :6], qkv[:, 6:8], qkv[:, 8:]
    scattered = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in parts]
    attention = NativeAttention(library(), step.kv, step.context, step.windows, 0.3, 2)
    assert torch.equal(attention(1, *parts), want)
    assert torch.equal(attention(1, *scattered), want)


def test_bfloat16_is_rounded_as_torch_does() -> None:
    step = Step(Shape(dtype=torch.bfloat16, head_dim=256, heads=2), [(0, 16)])
    step.contexts[0] *= torch.logspace(-38, 30, 16)[None, None, :, None, None]
    step.contexts[0][0, 1, 0, 0, :3] = torch.tensor([float("nan"), float("inf"), 1 + 2**-8])
    step.run(layer=0)
    block = step.context.spans[0].block_ids[0]
    for kind in (0, 1):
        want = step.contexts[0][0, kind].to(torch.bfloat16).transpose(0, 1)
        torch.testing.assert_close(step.kv[block, 0, kind], want, rtol=0, atol=0, equal_nan=True)


def test_a_pool_without_whole_pages_is_refused() -> None:
    step = Step(Shape(), [(0, 1)])
    with pytest.raises(ValueError, match="whole pages"):
        step.run(kv=step.kv.transpose(4, 5).contiguous().transpose(4, 5))
    with pytest.raises(ValueError, match="whole pages"):
        step.run(kv=step.kv.half())
