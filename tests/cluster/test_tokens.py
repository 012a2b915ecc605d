"""Every topology, mover, chunk size and pool gives the tokens of the plain loop."""

import asyncio
import random

import pytest

from core.sampling import BadWord, LogitBias, Sampling
from router.request import Token
from tests.cluster.conftest import Start
from tests.rig.cluster import Router
from tests.rig.tiny import VOCAB, Oracle

OUTPUT = 12
SHAPES = {
    "hybrid": {"pools": [{"role": "hybrid"}], "batch": {"chunk_tokens": 64}},
    "shm": {"transport": {"mover": "shm"}, "batch": {"chunk_tokens": 16}},
    "tcp": {"transport": {"mover": "tcp"}, "batch": {"chunk_tokens": 512}},
    "two_each_small_pools": {
        "pools": [{"role": "prefill", "replicas": 2}, {"role": "decode", "replicas": 2}],
        "kv": {"blocks": 40},
    },
}


def prompts() -> list[tuple[int, ...]]:
    """Block boundaries ±1, shared prefixes, a long one."""
    source = random.Random(3)
    shared = tuple(source.randrange(VOCAB) for _ in range(100))
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 100, 250]
    cold = [tuple(source.randrange(VOCAB) for _ in range(n)) for n in lengths]
    return cold + [shared[: 16 * k] + p for k, p in enumerate(cold[:6])]


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_equal_the_plain_loop(start: Start, oracle: Oracle, shape: str) -> None:
    cluster = start(**SHAPES[shape])

    async def run() -> None:
        async with Router(cluster) as router:
            for _ in range(2):  # the second round finds the first in the prefix caches
                outs = await asyncio.gather(*(router.tokens(p, greedy(OUTPUT)) for p in prompts()))
                for prompt, (tokens, _) in zip(prompts(), outs, strict=True):
                    assert tokens == oracle.tokens(prompt, OUTPUT)

    asyncio.run(run())
    cluster.settle()


def test_a_pool_too_small_for_all_preempts_and_loses_nothing(start: Start, oracle: Oracle) -> None:
    cluster = start(pools=[{"role": "hybrid"}], kv={"blocks": 24})
    source = random.Random(5)
    several = [tuple(source.randrange(VOCAB) for _ in range(40)) for _ in range(8)]

    async def run() -> None:
        async with Router(cluster) as router:
            outs = await asyncio.gather(*(router.tokens(p, greedy(60)) for p in several))
        assert [tokens for tokens, _ in outs] == [oracle.tokens(p, 60) for p in several]

    asyncio.run(run())
    counters = {c["name"]: c["value"] for c in cluster.workers["hybrid-0"].report()["counters"]}
    assert counters["preemptions"] > 0
    cluster.settle()


def test_a_repeat_reports_block_aligned_cached_tokens(start: Start) -> None:
    cluster = start(**SHAPES["shm"])
    prompt = tuple(random.Random(11).randrange(VOCAB) for _ in range(70))

    async def run() -> tuple[int, int, int, int]:
        async with Router(cluster) as router:
            _, cold = await router.tokens(prompt, greedy(4))
            _, warm = await router.tokens(prompt, greedy(4))
            _, salted = await router.tokens(prompt, greedy(4), salt="another tenant")
        return cold.cached_tokens, warm.cached_tokens, salted.cached_tokens, cold.moved_blocks

    assert asyncio.run(run()) == (0, 64, 0, 5)


def test_sampled_tokens_do_not_depend_on_the_batch(start: Start) -> None:
    cluster = start(**SHAPES["tcp"])
    prompt = tuple(range(30))
    sampling = Sampling(
        temperature=1.0, top_p=0.9, top_k=40, seed=99, max_tokens=20, ignore_eos=True
    )

    async def run() -> None:
        async with Router(cluster) as router:
            alone, _ = await router.tokens(prompt, sampling)
            crowd = await asyncio.gather(
                router.tokens(prompt, sampling),
                *(router.tokens(tuple(range(i, 40 + i)), greedy(20)) for i in range(1, 8)),
            )
            assert crowd[0][0] == alone

    asyncio.run(run())


STEERED = Sampling(
    temperature=1.2,
    min_p=0.01,
    seed=5,
    max_tokens=24,
    min_tokens=24,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    logit_bias=(LogitBias(9, 2.0),),
    bad_words=(BadWord((9, 9)),),
    logprobs=3,
)


def test_steered_sampling_and_its_logprobs_are_the_same_on_one_worker_and_across_two(
    start: Start,
) -> None:
    """The second worker goes on where the first sampled one token: with its penalties."""

    async def tokens(shape: str) -> list[Token]:
        async with Router(start(**SHAPES[shape])) as router:
            request = router.request(tuple(range(30)), STEERED)
            return [t async for batch in await router.dispatcher.generate(request) for t in batch]

    one, two = (asyncio.run(tokens(shape)) for shape in ("hybrid", "shm"))
    assert [t.id for t in one] == [t.id for t in two]
    assert len(one) == 24
    for a, b in zip(one, two, strict=True):
        assert a.logprobs is not None
        assert b.logprobs is not None
        assert a.logprobs.logprob == pytest.approx(b.logprobs.logprob, abs=1e-4)
        assert [t.token for t in a.logprobs.top] == [t.token for t in b.logprobs.top]


def greedy(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens, ignore_eos=True)
