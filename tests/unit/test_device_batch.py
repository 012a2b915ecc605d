"""From plan to tensors: where rows go, which plans are refused."""

import pytest

from core.errors import InternalError
from core.ids import AttemptKey, BlockId, RequestId
from core.kvlayout import KVLayout
from core.sampling import Sampling
from engine.device.batch import build_batch
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


def test_rows_follow_the_plan_and_answers_find_their_works() -> None:
    plan = Plan((work(5), work(1, 2), work(3, 4, sampled=False), work(1, 9), work(2, 0)))
    batch = build_batch(plan, LAYOUT)
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 2, 4, 5, 6, 9, 0, 1]
    assert batch.token_ids.tolist() == [*range(100, 105), 100, *range(100, 103), 100, 100, 101]
    assert batch.sampled == (0, 1, 3, 4)
    assert batch.sample_rows.tolist() == [4, 5, 9, 11]
    assert [a.index for a in batch.asks] == [0, 2, 9, 0]
    spans = [(s.first_row, s.queries, s.start) for s in batch.context.spans]
    assert spans == [(0, 5, 0), (5, 1, 2), (6, 3, 4), (9, 1, 9), (10, 2, 0)]


def test_positions_are_written_where_the_block_table_says() -> None:
    blocks = (BlockId(9), BlockId(4), BlockId(7))
    plan = Plan((Work(AttemptKey(RequestId("r"), 1), (1, 2, 3, 4, 5), 3, blocks),))
    context = build_batch(plan, LAYOUT).context
    assert context.block_ids.tolist() == [9, 4, 4, 4, 4]
    assert context.offsets.tolist() == [3, 0, 1, 2, 3]


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
