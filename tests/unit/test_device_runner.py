"""Tokens do not depend on how the work is cut, batched, placed, or on what lay there before."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InternalError
from core.ids import AttemptKey, BlockId, RequestId
from core.sampling import Sampling
from engine.device.backend import TorchBackend
from engine.device.pool import KVPool
from engine.device.runner import Runner, auto_dtype, kv_layout
from engine.model.decoder import Decoder
from engine.policy.plan import Plan, SampleAt, Work
from engine.reference import greedy
from tests.unit.llama_help import Bench, config_of, model_of, random_tokens, smollm, twin

SAMPLED = Sampling(temperature=0.9, top_p=0.95, seed=11)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return model_of(twin())


def expected(model: Decoder, prompt: tuple[int, ...], count: int) -> list[int]:
    return [step.token for step in greedy(model, model.config, prompt, count, ())]


@pytest.mark.parametrize("chunk", [1, 16, 64, 512])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 530])
def test_chunk_sizes_give_the_same_tokens(model: Decoder, chunk: int, length: int) -> None:
    prompt = random_tokens(length, length)
    assert Bench(model).generate(prompt, 6, chunk) == expected(model, prompt, 6)


def test_chunked_smollm2_gives_the_tokens_of_the_reference() -> None:
    model, _ = smollm()
    prompt = random_tokens(2, 70, model.config.vocab_size)
    assert Bench(model).generate(prompt, 4, chunk=33) == expected(model, prompt, 4)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_mixed_batch_of_sixteen_equals_singles(model: Decoder, block_size: int) -> None:
    lengths = [1, 2, 15, 16, 17, 5, 90, 33, 48, 7, 64, 3, 120, 9, 31, 10]
    prompts = [random_tokens(i, n) for i, n in enumerate(lengths)]
    alone = []
    for i, prompt in enumerate(prompts):
        bench = Bench(model, block_size, 1024)
        running = bench.start(prompt, SAMPLED if i % 3 else Sampling())
        for _ in range(5):
            bench.step([running])
        alone.append(running.output)
    bench = Bench(model, block_size, 1024)
    runnings = [bench.start(p, SAMPLED if i % 3 else Sampling()) for i, p in enumerate(prompts)]
    bench.step(runnings[::2])
    for _ in range(4):
        bench.step(runnings)
    bench.step(runnings[1::2])
    assert [r.output for r in runnings] == alone


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), block_size=st.sampled_from([1, 2, 5, 16]))
def test_any_schedule_over_reused_scattered_blocks_gives_the_reference_tokens(
    model: Decoder, seed: int, block_size: int
) -> None:
    """Sequences come, advance by random chunks in random company, and leave poison behind."""
    rng = random.Random(seed)
    bench = Bench(model, block_size, blocks=4 * -(-60 // block_size))
    live = []
    for serial in range(30):
        if len(live) < 4 and rng.random() < 0.5:
            live.append(bench.start(random_tokens(seed + serial, rng.randint(1, 50))))
        if chosen := rng.sample(live, rng.randint(0, len(live))):
            bench.step(chosen, most=rng.choice([1, 4, 7, 1000]))
        for running in [r for r in live if len(r.output) >= 5]:
            live.remove(running)
            bench.end(running)
            assert running.output == expected(model, running.prompt, len(running.output))
    for running in live:
        assert running.output == expected(model, running.prompt, len(running.output))


def test_two_sequences_read_the_same_prefix_blocks_even_in_the_step_that_writes_them(
    model: Decoder,
) -> None:
    bench = Bench(model, block_size=4)
    prefix = random_tokens(1, 8)
    tails = [random_tokens(20 + i, 5) for i in range(2)]
    owner, guest = (bench.start(prefix + tail) for tail in tails)
    bench.work(owner, 13)
    guest.blocks, guest.computed = owner.blocks[:2], 8
    bench.step([guest, owner])
    bench.step([guest, owner])
    assert owner.output == expected(model, owner.prompt, 2)
    assert guest.output == expected(model, guest.prompt, 2)


def test_only_the_cells_of_the_work_are_written(model: Decoder) -> None:
    bench = Bench(model, block_size=4, blocks=8)
    running = bench.start(random_tokens(1, 6))
    bench.step([running])
    written = ~torch.isnan(bench.pool.kv)
    first, second = running.blocks
    assert written[first].all()
    assert written[second, :, :, :, :2].all()
    assert written.sum() == written[first].sum() * 3 // 2


def test_no_answer_where_none_is_asked(model: Decoder) -> None:
    bench = Bench(model)
    key = AttemptKey(RequestId("r"), 0)
    silent = Work(key, (1, 2), 0, (BlockId(0),))
    asking = Work(key, (1, 2), 0, (BlockId(1),), SampleAt(Sampling(), 0))
    assert bench.runner.run(Plan((silent,))) == [None]
    nothing, sampled = bench.runner.run(Plan((silent, asking)))
    assert nothing is None
    assert sampled is not None
    assert [sampled.token] == expected(model, (1, 2), 1)


def test_an_empty_plan_has_no_answers(model: Decoder) -> None:
    assert Bench(model).runner.run(Plan()) == []


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_warm_up_leaves_the_pool_as_if_unused(model: Decoder, block_size: int) -> None:
    bench = Bench(model, block_size, blocks=2)
    bench.pool.kv.zero_()
    bench.runner.warm_up()
    assert not bench.pool.kv.any()


def test_a_pool_laid_out_for_another_model_is_refused(model: Decoder) -> None:
    layout = kv_layout(config_of(twin(num_hidden_layers=3)), 16, "float32")
    pool = KVPool(layout, 1, memoryview(bytearray(layout.block_bytes)))
    with pytest.raises(InternalError, match="does not fit"):
        Runner(model, pool, TorchBackend.of(torch.float32))


@pytest.mark.parametrize(
    ("features", "dtype"),
    [
        ({"avx2": True, "avx512_bf16": False, "amx_bf16": False}, "float32"),
        ({"avx512_bf16": True}, "bfloat16"),
        ({"amx_bf16": True}, "bfloat16"),
        ({"architecture": "arm64"}, "float32"),
    ],
    ids=["avx2", "avx512_bf16", "amx", "unknown"],
)
def test_auto_dtype_is_bfloat16_only_where_the_cpu_computes_in_it(
    monkeypatch: pytest.MonkeyPatch, features: dict[str, object], dtype: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    assert auto_dtype(torch.device("cpu")) == dtype
