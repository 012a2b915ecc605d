"""Decodes that share blocks get, to the last bit, what each gets by itself."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.ids import BlockId
from engine.model.attention import Span, StepContext
from engine.native.attention import NativeAttention, sharings_of
from tests.unit.native_help import library

HEADS, KV_HEADS, DIM, LAYERS = 6, 2, 32, 2
SEGMENT = library().segment

Tails = list[tuple[int, int]]
"""(prefix, tokens of its own) of each decode."""


@dataclass(frozen=True, slots=True)
class Step:
    """Decodes over prefixes, which lie in the pool once, after a chunk of another prompt."""

    kv: Tensor
    context: StepContext
    inputs: tuple[Tensor, ...]

    def run(self, spans: tuple[Span, ...], windows: tuple[int, ...], threads: int) -> Tensor:
        context = StepContext(spans, torch.empty(0), torch.empty(0))
        attention = NativeAttention(library(), self.kv.clone(), context, windows, 0.2, threads)
        rows = [row for span in spans for row in range(*self._rows_of(span))]
        return attention(1, *(x[rows] for x in self.inputs))

    def _rows_of(self, span: Span) -> tuple[int, int]:
        (own,) = [s for s in self.context.spans if s.block_ids == span.block_ids]
        return own.first_row, own.end_row


def step(prefixes: list[int], tails: Tails, size: int, dtype: torch.dtype) -> Step:
    """prefixes: lengths in blocks of `size` positions."""
    fresh = iter(range(100_000))

    def take(count: int) -> tuple[BlockId, ...]:
        return tuple(BlockId(next(fresh)) for _ in range(count))

    common = [take(n) for n in prefixes]
    spans = [Span(0, 5, 2, take(-(-7 // size)))]
    for which, own in tails:
        table = (*common[which], *take(-(-(own + 1) // size)))
        spans.append(Span(len(spans) + 4, 1, len(common[which]) * size + own, table))
    generator = torch.Generator().manual_seed(len(tails))
    shape = (next(fresh), LAYERS, 2, KV_HEADS, size, DIM)
    rows = spans[-1].end_row
    return Step(
        torch.randn(shape, generator=generator).to(dtype),
        StepContext(tuple(spans), torch.empty(0), torch.empty(0)),
        tuple(torch.randn(rows, h, DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS)),
    )


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 3 * SEGMENT), min_size=1, max_size=3),
    tails=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 300)), min_size=1, max_size=8),
    size=st.sampled_from([1, 3, 16, 256, 512]),
    windows=st.sampled_from([(0, 0), (0, 300)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_sharing_changes_no_bit_for_anybody(
    lengths: list[int], tails: Tails, size: int, windows: tuple[int, ...], dtype: torch.dtype
) -> None:
    tails = [(which % len(lengths), own) for which, own in tails]
    made = step([length // size for length in lengths], tails, size, dtype)
    together = made.run(made.context.spans, windows, threads=2)
    for span in made.context.spans:
        alone = Span(0, span.queries, span.start, span.block_ids)
        assert torch.equal(made.run((alone,), windows, threads=1), together[span.rows])


def test_a_group_larger_than_a_task_is_divided() -> None:
    made = step([2 * SEGMENT // 16], [(0, own) for own in range(70)], 16, torch.float32)
    together = made.run(made.context.spans, (0, 0), threads=2)
    for span in made.context.spans[1::9]:
        alone = Span(0, 1, span.start, span.block_ids)
        assert torch.equal(made.run((alone,), (0, 0), threads=1), together[span.rows])


def test_what_is_shared_is_whole_segments_of_decodes() -> None:
    blocks = SEGMENT // 16
    spans = step([2 * blocks + 5, blocks], [(0, 3), (1, 9), (0, 99), (1, 0)], 16, torch.float32)
    assert sharings_of(spans.context.spans, 16, SEGMENT) == ([(0, 2, 2), (2, 2, 1)], [1, 3, 2, 4])
    short = step([blocks - 1], [(0, 3), (0, 9)], 16, torch.float32)
    assert sharings_of(short.context.spans, 16, SEGMENT) == ([], [])


@pytest.mark.parametrize(("size", "shared"), [(16, 3), (512, 4), (96, 3)])
def test_blocks_and_segments_need_not_be_of_one_size(size: int, shared: int) -> None:
    """Runs are of whole blocks and whole segments."""
    made = step([-(-3 * SEGMENT // size)], [(0, 1), (0, 2)], size, torch.float32)
    ((_, _, segments),), _ = sharings_of(made.context.spans, size, SEGMENT)
    assert segments == shared
