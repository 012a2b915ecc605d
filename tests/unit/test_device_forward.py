"""Works that pass the layers group by group end up where those that pass at once do."""

from itertools import pairwise

import pytest
import torch

from core.errors import InternalError
from core.ids import AttemptKey, BlockId, RequestId
from core.sampling import Sampling
from engine.device.backend import TorchBackend
from engine.device.batch import build_batch, part_of
from engine.device.forward import stages
from engine.device.pool import KVPool
from engine.device.runner import Runner, kv_layout
from engine.model.decoder import Decoder
from engine.policy.plan import LayerGroup, Plan, SampleAt, Work
from engine.reference import greedy
from tests.unit.expert_help import LAYERS, VOCAB, moe_decoder

MODEL = moe_decoder()
BLOCKS = 8
PROMPT = tuple((11 * i + 2) % VOCAB for i in range(13))
OTHER = tuple((5 * i + 1) % VOCAB for i in range(6))


class Bench:
    def __init__(self, model: Decoder = MODEL) -> None:
        self.layout = kv_layout(model.config, 4, "float32")
        memory = memoryview(bytearray(BLOCKS * self.layout.block_bytes))
        self.pool = KVPool(self.layout, BLOCKS, memory)
        self.pool.kv.fill_(float("nan"))
        self.runner = Runner(model, self.pool, TorchBackend.of(torch.float32))

    def run(self, *works: Work) -> list[int | None]:
        return [sampled and sampled.token for sampled in self.runner.run(Plan(works))]


def work(name: str, tokens: tuple[int, ...], first_block: int, *layers: int) -> Work:
    """The whole prompt through layers from, to (none given: all)."""
    group = LayerGroup(layers[0], layers[1], LAYERS) if layers else None
    done = group is None or group.is_last
    return Work(
        AttemptKey(RequestId(name), 1),
        tokens,
        0,
        tuple(BlockId(first_block + i) for i in range(-(-len(tokens) // 4))),
        SampleAt(Sampling(), 0) if done else None,
        group,
    )


def expected(tokens: tuple[int, ...]) -> int:
    return greedy(MODEL, MODEL.config, tokens, 1, ())[0].token


@pytest.mark.parametrize("cuts", [(0, 3), (0, 1, 3), (0, 2, 3), (0, 1, 2, 3)])
def test_layer_groups_give_the_kv_and_the_counts_and_the_token_of_one_pass(
    cuts: tuple[int, ...],
) -> None:
    whole, grouped = Bench(), Bench()
    assert whole.run(work("a", PROMPT, 0)) == [expected(PROMPT)]
    answers = [grouped.run(work("a", PROMPT, 0, start, stop)) for start, stop in pairwise(cuts)]
    assert [a for (a,) in answers] == [None] * (len(cuts) - 2) + [expected(PROMPT)]
    torch.testing.assert_close(grouped.pool.kv, whole.pool.kv, equal_nan=True)
    assert torch.equal(grouped.pool.expert_counts, whole.pool.expert_counts)


def test_others_pass_all_layers_meanwhile() -> None:
    bench = Bench()
    first = bench.run(work("b", OTHER, 4), work("a", PROMPT, 0, 0, 1))
    second = bench.run(work("a", PROMPT, 0, 1, 2), work("b", OTHER, 4))
    third = bench.run(work("b", OTHER, 4), work("a", PROMPT, 0, 2, 3), work("c", OTHER[:2], 6))
    assert first == [expected(OTHER), None]
    assert second == [None, expected(OTHER)]
    assert third == [expected(OTHER), expected(PROMPT), expected(OTHER[:2])]


def test_what_the_next_step_does_not_go_on_with_is_forgotten() -> None:
    bench = Bench()
    bench.run(work("a", PROMPT, 0, 0, 2))
    bench.run(work("b", OTHER, 4))
    with pytest.raises(InternalError, match=r"a#1 goes on in the middle"):
        bench.run(work("a", PROMPT, 0, 2, 3))
    assert bench.run(work("a", PROMPT, 0, 0, 1)) == [None]
    with pytest.raises(InternalError, match=r"a#1 goes on in the middle"):
        bench.run(work("a", PROMPT[:5], 0, 1, 3))


def test_stages_are_cut_where_a_work_begins_or_stops() -> None:
    works = [work("a", PROMPT, 0, 1, 2), work("b", OTHER, 4)]
    assert stages(works, LAYERS) == [range(1), range(1, 2), range(2, 3)]
    assert stages(works[:1], LAYERS) == [range(1, 2)], "layers that nothing passes cost nothing"
    assert stages(works[1:], LAYERS) == [range(3)]


def test_a_part_of_a_batch_has_its_rows_and_its_places() -> None:
    bench = Bench()
    batch = build_batch(Plan((work("a", OTHER, 0), work("b", OTHER[:2], 2))), bench.layout)
    part = part_of(batch, (1,))
    assert isinstance(part.rows, torch.Tensor)
    assert part.rows.tolist() == [6, 7]
    assert part.positions.tolist() == [0, 1]
    assert part.context.block_ids.tolist() == [2, 2]
    assert [(s.first_row, s.queries) for s in part.context.spans] == [(0, 2)]
    assert part_of(batch, (0, 1)).context is batch.context
