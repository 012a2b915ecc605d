"""Which mover carries the blocks, what happens when it fails, and who may not join at all."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from core.errors import Incompatible
from core.messages import WIRE_VERSION, Hello, Role
from core.sampling import Sampling
from core.spec import KVSpec
from tests.cluster.conftest import Start
from tests.rig.cluster import Cluster, Router
from tests.rig.tiny import VOCAB, Oracle
from tests.rig.workers import Worker
from transport.session_client import ClientSession

OUTPUT = 6


def prompt(seed: int) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(VOCAB) for _ in range(100))


def counters(cluster: Cluster, worker: str) -> dict[str, int]:
    return {c["name"]: c["value"] for c in cluster.workers[worker].report()["counters"]}


def generate(cluster: Cluster, seed: int) -> tuple[list[int], Any]:
    async def run() -> tuple[list[int], Any]:
        async with Router(cluster) as router:
            return await router.tokens(prompt(seed), Sampling(max_tokens=OUTPUT, ignore_eos=True))

    return asyncio.run(run())


def test_a_mover_that_damages_blocks_is_left_for_the_next_one(start: Start, oracle: Oracle) -> None:
    """The transfer is repeated over TCP within the same attempt; stepping down is counted."""
    cluster = start(kv={"blocks": 128})
    tokens, first = generate(cluster, 1)
    assert (tokens, first.mover) == (oracle.tokens(prompt(1), OUTPUT), "shm")
    cluster.workers["prefill-0"].set_faults([{"on": "data", "action": "corrupt"}])
    tokens, second = generate(cluster, 2)
    assert tokens == oracle.tokens(prompt(2), OUTPUT)
    assert (second.mover, second.attempts, second.degraded) == ("tcp", 1, [])
    assert counters(cluster, "prefill-0")["mover_fallbacks"] == 1
    assert counters(cluster, "decode-0")["data_frames_failed"] == 1
    cluster.settle()


def test_a_forced_mover_that_fails_is_not_replaced_the_decode_side_computes(
    start: Start, oracle: Oracle
) -> None:
    cluster = start(kv={"blocks": 128}, transport={"mover": "tcp"})
    cluster.workers["prefill-0"].set_faults([{"on": "data", "action": "corrupt"}])
    tokens, accounting = generate(cluster, 3)
    assert tokens == oracle.tokens(prompt(3), OUTPUT)
    assert accounting.degraded
    assert counters(cluster, "prefill-0")["handoffs_failed"] == 1
    tokens, accounting = generate(cluster, 4)
    assert (tokens, accounting.mover) == (oracle.tokens(prompt(4), OUTPUT), "tcp")
    cluster.settle()


def test_workers_of_different_layout_never_exchange_blocks(start: Start, oracle: Oracle) -> None:
    """The decode worker is replaced by one with other blocks: requests are computed there."""
    cluster = start(kv={"blocks": 127})
    old = cluster.workers["decode-0"]
    old.stop()
    other = replace(cluster.spec, kv=KVSpec(block_size=8, blocks=127))
    cluster.workers["decode-0"] = Worker("decode-0", Role.DECODE, other, 127)
    cluster.workers["decode-0"].ready()
    cluster.introduce()
    tokens, accounting = generate(cluster, 5)
    assert tokens == oracle.tokens(prompt(5), OUTPUT)
    assert accounting.degraded
    assert accounting.moved_blocks == 0
    cluster.settle()


def test_a_worker_of_an_earlier_epoch_or_wire_is_refused_by_name(start: Start) -> None:
    cluster = start(kv={"blocks": 128})
    info = cluster.workers["decode-0"].info

    async def knock(hello: Hello) -> str:
        with pytest.raises(Incompatible) as caught:
            await ClientSession.connect(info.address, hello, print, print, 5.0)
        return caught.value.field

    async def run() -> tuple[str, str]:
        stale = Hello(WIRE_VERSION, "somebody", info.epoch - 1)
        foreign = Hello(WIRE_VERSION + 1, "somebody", info.epoch)
        return await knock(stale), await knock(foreign)

    assert asyncio.run(run()) == ("epoch", "wire_version")
