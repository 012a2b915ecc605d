"""From plan to tensors: what attends together, where rows go, which plans are refused."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InternalError
from core.ids import AttemptKey, BlockId, RequestId
from core.kvlayout import KVLayout
from core.messages import Sampling
from engine.device.batch import GROUP_COST_TOKENS, build_batch, partition
from engine.policy.plan import Plan, SampleAt, Work

LAYOUT = KVLayout(layers=3, kv_heads=2, block_size=4, head_dim=8, dtype="float32")


def work(count: int, start: int = 0, first_block: int = 0, sampled: bool = True) -> Work:
    blocks = LAYOUT.blocks_for(start + count)
    return Work(
        AttemptKey(RequestId("r"), 1),
        tuple(range(100, 100 + count)),
        start,
        tuple(BlockId(first_block + i) for i in range(blocks)),
        SampleAt(Sampling(), start) if sampled else None,
    )


def test_rows_follow_the_groups_and_answers_find_their_works() -> None:
    plan = Plan((work(5), work(1, 2), work(3, 4, sampled=False), work(1, 9), work(2, 0)))
    batch = build_batch(plan, LAYOUT)
    assert batch.positions.tolist() == [9, 2, 0, 1, 2, 3, 4, 4, 5, 6, 0, 1]
    assert batch.token_ids.tolist() == [100, 100, *range(100, 105), *range(100, 103), 100, 101]
    assert batch.sampled == (3, 1, 0, 4)
    assert batch.sample_rows.tolist() == [0, 1, 6, 11]
    assert [a.index for a in batch.asks] == [9, 2, 0, 0]
    assert [g.first_row for g in batch.context.groups] == [0, 2, 7, 10]


def test_positions_are_written_where_the_block_table_says() -> None:
    blocks = (BlockId(9), BlockId(4), BlockId(7))
    plan = Plan((Work(AttemptKey(RequestId("r"), 1), (1, 2, 3, 4, 5), 3, blocks),))
    context = build_batch(plan, LAYOUT).context
    assert context.block_ids.tolist() == [9, 4, 4, 4, 4]
    assert context.offsets.tolist() == [3, 0, 1, 2, 3]


def test_a_table_may_be_longer_than_the_work_needs() -> None:
    blocks = tuple(BlockId(i) for i in range(8))
    plan = Plan((Work(AttemptKey(RequestId("r"), 1), (1,), 3, blocks),))
    (group,) = build_batch(plan, LAYOUT).context.groups
    assert group.width == 4


@given(st.lists(st.integers(0, 4000), min_size=1, max_size=40))
def test_decodes_are_grouped_so_that_padding_stays_cheap(starts: list[int]) -> None:
    works = [work(1, start) for start in starts]
    parts = partition(works, LAYOUT)
    assert sorted(i for part in parts for i in part) == list(range(len(works)))
    widths = [[LAYOUT.blocks_for(starts[i] + 1) * 4 for i in part] for part in parts]
    for group in widths:
        assert sum(group[0] - w for w in group) <= GROUP_COST_TOKENS
    for group, following in pairwise(widths):
        wasted = sum(group[0] - w for w in group) + group[0] - following[0]
        assert wasted > GROUP_COST_TOKENS


def test_works_of_several_tokens_attend_alone() -> None:
    assert partition([work(2), work(1), work(2)], LAYOUT) == [[1], [0], [2]]


def test_masks_are_causal_from_the_start_of_the_work() -> None:
    (group,) = build_batch(Plan((work(3, start=4),)), LAYOUT).context.groups
    seen = torch.isfinite(group.mask[0, 0])
    assert seen.sum(-1).tolist() == [5, 6, 7]
    assert all(row[:n].all() for row, n in zip(seen, (5, 6, 7), strict=True))


@pytest.mark.parametrize(
    ("token_ids", "start", "blocks"),
    [((), 0, 1), ((1,), 4, 1), ((1, 2, 3, 4, 5), 0, 1)],
    ids=["no_tokens", "start_beyond_table", "end_beyond_table"],
)
def test_a_work_that_does_not_fit_its_table_is_refused_by_name(
    token_ids: tuple[int, ...], start: int, blocks: int
) -> None:
    bad = Work(
        AttemptKey(RequestId("culprit"), 2),
        token_ids,
        start,
        tuple(BlockId(i) for i in range(blocks)),
    )
    with pytest.raises(InternalError, match="culprit#2"):
        build_batch(Plan((work(1), bad)), LAYOUT)
