"""Every fault on every message: one hit changes no token and leaves nothing behind."""

import asyncio
import random
from typing import Any

import pytest

from core.sampling import Sampling
from tests.cluster.conftest import Start
from tests.rig.cluster import Cluster, Router
from tests.rig.tiny import VOCAB, Oracle

ACTIONS = ["drop", "delay", "duplicate", "reorder", "truncate", "corrupt"]
FROM_WORKERS = [
    "Welcome", "Grant", "Accepted", "Fault", "StepEvents", "PrefillDone", "AttemptFailed",
    "WorkerReport", "Hello", "Abort", "data",
]  # fmt: skip
FROM_ROUTER = ["Hello", "Reserve", "Prefill", "Attach", "Cancel", "Renew"]
KILLING = ["Welcome", "Grant", "Accepted", "StepEvents", "PrefillDone", "WorkerReport", "data"]
OUTPUT = 25


def rule(on: str, action: str, count: int = 1) -> dict[str, Any]:
    return {"on": on, "action": action, "skip": 1, "count": count, "delay_s": 0.2}


def prompts(seed: str) -> list[tuple[int, ...]]:
    source = random.Random(seed)
    return [tuple(source.randrange(VOCAB) for _ in range(n)) for n in (5, 33, 64, 200, 90, 16)]


async def exchange(cluster: Cluster, oracle: Oracle, seed: str, router_rules: list[Any]) -> None:
    """Streams, one of them cancelled and some refused, all under the rules that are set."""
    from core.spec import FaultSpec

    async with Router(cluster) as router:
        router.faults.set([FaultSpec(**r) for r in router_rules])
        sampling = Sampling(max_tokens=OUTPUT, ignore_eos=True)
        async with asyncio.timeout(60):
            outs, *_ = await asyncio.gather(
                asyncio.gather(*(router.tokens(p, sampling) for p in prompts(seed))),
                router.cancelled(router.request([9] * 80, sampling), 0.02),
            )
        for prompt, (tokens, _) in zip(prompts(seed), outs, strict=True):
            assert tokens == oracle.tokens(prompt, OUTPUT)


@pytest.mark.parametrize("message", FROM_WORKERS)
def test_a_fault_on_what_workers_send(start: Start, oracle: Oracle, message: str) -> None:
    cluster = start(batch={"max_running": 4, "chunk_tokens": 64})
    for action in ACTIONS:
        for worker in cluster.workers.values():
            worker.set_faults([rule(message, action)])
        asyncio.run(exchange(cluster, oracle, f"{message}-{action}", []))
        for worker in cluster.workers.values():
            worker.set_faults([])
        cluster.settle()


@pytest.mark.parametrize("message", FROM_ROUTER)
def test_a_fault_on_what_the_router_sends(start: Start, oracle: Oracle, message: str) -> None:
    cluster = start(batch={"max_running": 4, "chunk_tokens": 64})
    for action in ACTIONS:
        asyncio.run(exchange(cluster, oracle, f"r-{message}-{action}", [rule(message, action)]))
        cluster.settle()


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_worker_that_dies_on_any_message(start: Start, oracle: Oracle, victim: str) -> None:
    cluster = start(batch={"max_running": 4, "chunk_tokens": 64})
    for message in KILLING:
        cluster.workers[victim].set_faults([rule(message, "kill")])
        asyncio.run(exchange(cluster, oracle, f"kill-{victim}-{message}", []))
        if not cluster.workers[victim].alive:
            cluster.restart(victim)
        else:
            cluster.workers[victim].set_faults([])
        cluster.settle()
