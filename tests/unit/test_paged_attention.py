"""What attends together over the paged pool, and what each row may see."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.ids import BlockId
from engine.model.attention import Span, StepContext
from engine.model.paged import PagedAttention
from engine.model.pages import GROUP_COST_TOKENS, partition

SIZE, HEADS, DIM = 4, 2, 8


def blocks_for(tokens: int) -> int:
    return -(-tokens // SIZE)


def span(queries: int, start: int = 0, first_row: int = 0) -> Span:
    blocks = tuple(BlockId(i) for i in range(blocks_for(start + queries)))
    return Span(first_row, queries, start, blocks)


@given(st.lists(st.integers(0, 4000), min_size=1, max_size=40))
def test_decodes_are_grouped_so_that_padding_stays_cheap(starts: list[int]) -> None:
    parts = partition([span(1, start) for start in starts], SIZE)
    assert sorted(i for part in parts for i in part) == list(range(len(starts)))
    widths = [[blocks_for(starts[i] + 1) * SIZE for i in part] for part in parts]
    for group in widths:
        assert sum(group[0] - w for w in group) <= GROUP_COST_TOKENS
    for group, following in pairwise(widths):
        wasted = sum(group[0] - w for w in group) + group[0] - following[0]
        assert wasted > GROUP_COST_TOKENS


def test_spans_of_several_rows_attend_alone() -> None:
    assert partition([span(2), span(1), span(2)], SIZE) == [[1], [0], [2]]


@pytest.mark.parametrize("trailer", [0, 3], ids=["packed", "counters_behind_each_block"])
@pytest.mark.parametrize("window", [0, 1, 3, 6])
def test_a_row_sees_its_window_of_what_came_before_and_nothing_else(
    window: int, trailer: int
) -> None:
    """One chunk of 3 rows from position 4, its past poisoned outside the window."""
    kv = pool(blocks=3, trailer=trailer)
    past = torch.randn(2, HEADS, 4, DIM)
    kv[1, 0] = past
    context = StepContext(
        (Span(0, 3, 4, (BlockId(1), BlockId(2))),),
        torch.tensor([2, 2, 2]),
        torch.tensor([0, 1, 2]),
    )
    query = torch.randn(3, HEADS, DIM)
    key, value = torch.randn(2, 3, HEADS, DIM)
    got = PagedAttention(kv, context, [window], 0.5)(0, query, key, value)
    keys = torch.cat((past[0].transpose(0, 1), key))
    values = torch.cat((past[1].transpose(0, 1), value))
    for row in range(3):
        last = row + 5
        seen = slice(max(0, last - window) if window else 0, last)
        scores = torch.einsum("hd,thd->ht", query[row], keys[seen]) * 0.5
        expected = torch.einsum("ht,thd->hd", scores.softmax(-1), values[seen])
        torch.testing.assert_close(got[row], expected)


def pool(blocks: int, trailer: int) -> torch.Tensor:
    """Full of NaN; `trailer` pages lie behind each block."""
    block, page = 2 * HEADS * SIZE * DIM, SIZE * DIM
    whole = torch.full((blocks, block + trailer * page), float("nan"))
    return whole[:, :block].view(blocks, 1, 2, HEADS, SIZE, DIM)
