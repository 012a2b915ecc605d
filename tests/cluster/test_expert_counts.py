"""Expert counts of a mixture of experts reach the router, whoever computed which block."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from core.sampling import Sampling
from core.spec import RouterSpec
from router.request import Accounting
from tests.cluster.conftest import Start
from tests.models import make
from tests.rig.cluster import Cluster, Router
from tests.rig.tiny import decoder
from tests.unit.expert_help import plain_counts

PROMPT = tuple((11 * i + 5) % 97 for i in range(60))
OUTPUT = 12


async def ask(cluster: Cluster, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], Accounting]:
    async with Router(cluster) as router:
        out, accounting = await router.tokens(tokens, Sampling(max_tokens=OUTPUT, ignore_eos=True))
        return tokens + tuple(out), accounting


def test_counts_come_with_prefill_by_hand_over_and_from_either_cache(
    start: Start, tmp_path: Path
) -> None:
    folder = make("mixtral", tmp_path)
    cluster = start(model={"ref": str(folder), "dtype": "float32"})
    near = SimpleNamespace(
        spec=replace(cluster.spec, router=RouterSpec(disagg_min_tokens=1000)),
        workers=cluster.workers,
    )

    async def run() -> list[tuple[tuple[int, ...], Accounting]]:
        cold = await ask(cluster, PROMPT)
        warm = await ask(cluster, cold[0])  # the prompt's blocks are in the prefill worker's cache
        local = await ask(near, warm[0])  # the decode worker has them all, moved or decoded
        return [(PROMPT, cold[1]), (cold[0], warm[1]), (warm[0], local[1])]

    cold, warm, local = asyncio.run(run())
    model = decoder(folder)
    for tokens, accounting in (cold, warm, local):
        assert accounting.expert_counts == plain_counts(model, tokens)
        assert sum(accounting.expert_counts) == len(tokens) * 2 * 3, "two experts in each layer"
    assert [a.cached_tokens > 0 for _, a in (cold, warm, local)] == [False, True, True]
    assert [a.moved_blocks > 0 for _, a in (cold, warm, local)] == [True, True, False]
    cluster.settle()
