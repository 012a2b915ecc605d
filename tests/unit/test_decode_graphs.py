"""Recorded decode steps say what steps say that are computed as they come."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.ids import BlockId
from engine.device.cuda import FlexBackend
from engine.device.graphs import GraphedForward, Limits
from engine.device.pool import KVPool
from engine.device.runner import Runner
from engine.model.decoder import Decoder
from engine.policy.plan import LayerGroup, Plan
from tests.unit.cuda_help import attend, record
from tests.unit.llama_help import Bench, Running, model_of, random_tokens, twin

ROWS, WIDTH, SIZE, BLOCKS = 6, 5, 4, 48
GARBAGE = 30.0
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return model_of(twin())


class Recorded(Bench):
    """Over a pool of numbers that would show if they were taken for K or V."""

    def __init__(self, model: Decoder) -> None:
        super().__init__(model, SIZE, BLOCKS)
        self.pool = KVPool.on(CPU, self.layout, BLOCKS + 1)
        self.pool.kv.fill_(GARBAGE)
        self.backend = FlexBackend(torch.float32, CPU, attend)
        self.replayed: list[int] = []
        self.said: list[str] = []
        limits = Limits(ROWS, WIDTH, BlockId(BLOCKS))
        forward = GraphedForward(model, self.pool, self.backend, self.record, limits)
        self.runner = Runner(model, self.pool, self.backend, None, forward)
        self.before = self.pool.kv.clone()
        forward.record(self.said.append)

    def record(self, body: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        replay = record(body)

        def counted() -> torch.Tensor:
            hidden = replay()
            self.replayed.append(len(hidden))
            return hidden

        return counted

    def end(self, running: Running) -> None:
        self.pool.kv[running.blocks] = GARBAGE
        self.free = [*running.blocks, *self.free]


def test_recording_says_how_far_it_is_and_touches_the_spare_block_alone(model: Decoder) -> None:
    bench = Recorded(model)
    assert bench.said == [f"recording decode steps, {n} of 4" for n in (1, 2, 3, 4)]
    assert torch.equal(bench.pool.kv[:BLOCKS], bench.before[:BLOCKS])


@pytest.mark.parametrize(
    ("rows", "sizes"), [(1, (1,)), (2, (2, 1)), (6, (6, 4, 2, 1)), (32, (32, 16, 8, 4, 2, 1))]
)
def test_recordings_double_in_size_up_to_the_most_there_can_be(
    rows: int, sizes: tuple[int, ...]
) -> None:
    assert Limits(rows, WIDTH, BlockId(0)).sizes == sizes


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_company_gives_the_tokens_and_the_kv_of_plain_steps(model: Decoder, seed: int) -> None:
    """Sequences come, advance in random company, and go; each step is padded anew.  Whoever took
    a step takes another in the same company: the second is one of single tokens."""
    rng = random.Random(seed)
    recorded, plain = Recorded(model), Bench(model, SIZE, BLOCKS)
    recorded.free = list(plain.free)
    live: list[tuple[Running, Running]] = []
    for serial in range(6):
        if len(live) < ROWS:
            prompt = random_tokens(seed + serial, rng.randint(1, 9))
            live.append((recorded.start(prompt), plain.start(prompt)))
        chosen = rng.sample(live, rng.randint(1, len(live)))
        for _ in range(2):
            recorded.step([r for r, _ in chosen])
            plain.step([p for _, p in chosen])
        for pair in [p for p in live if len(p[0].output) >= 6]:
            live.remove(pair)
            recorded.end(pair[0])
            plain.end(pair[1])
        for mine, theirs in live:
            assert mine.output == theirs.output
            assert mine.blocks == theirs.blocks
            for place, block in enumerate(mine.blocks):
                filled = min(SIZE, max(0, mine.computed - place * SIZE))
                cells = (block, slice(None), slice(None), slice(None), slice(filled))
                torch.testing.assert_close(
                    recorded.pool.kv[cells], plain.pool.kv[cells], atol=1e-4, rtol=0
                )
    assert recorded.replayed


def decoding(bench: Bench, count: int, length: int = 3) -> list[Running]:
    runnings = [bench.start(random_tokens(i, length), name=f"r{i}") for i in range(count)]
    bench.step(runnings)
    return runnings


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6)])
def test_a_step_of_single_tokens_is_replayed_by_the_smallest_that_holds_it(
    model: Decoder, count: int, size: int
) -> None:
    bench = Recorded(model)
    runnings = decoding(bench, count)
    assert not bench.replayed
    bench.step(runnings)
    assert bench.replayed == [size]


def test_what_a_larger_step_computed_is_left_alone_by_a_smaller_one(model: Decoder) -> None:
    bench = Recorded(model)
    runnings = decoding(bench, 6)
    bench.step(runnings)
    before = bench.pool.kv.clone()
    bench.step(runnings[:5])
    assert bench.replayed == [6, 6]
    resting = runnings[5].blocks
    assert torch.equal(bench.pool.kv[resting], before[resting])


def test_other_steps_are_computed_as_they_come(model: Decoder) -> None:
    bench = Recorded(model)
    many = decoding(bench, ROWS + 1)
    bench.step(many)
    for running in many:
        bench.end(running)
    one = decoding(bench, 1)
    bench.step([*one, bench.start(random_tokens(9, 2))])
    (long,) = decoding(bench, 1, WIDTH * SIZE)
    bench.step([long])
    bench.runner.run(Plan((replace(bench.work(one[0], 1), layers=LayerGroup(0, 2, 2)),)))
    assert not bench.replayed
    bench.step(one)
    assert bench.replayed == [1]
