"""Workers of two ranks: the same tokens, KV that others take over, and one fate for all ranks."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import torch

from actors.boot import WorkerBoot
from actors.gang import Gang
from core.errors import WorkerLost
from core.ids import Epoch, WorkerId
from core.messages import Role
from core.sampling import Sampling
from core.spec import ClusterSpec, from_mapping
from tests import models
from tests.cluster.conftest import Start
from tests.cluster.test_deaths import LIMITS, OUTPUT, prompts, streams_with
from tests.rig.cluster import Cluster, Router
from tests.rig.processes import alive, listeners, until
from tests.rig.tiny import Oracle
from tests.rig.workers import Worker
from transport.arena import MemfdArena

DETECTION_S = 3.0
SPLIT_DECODE = {
    "pools": [{"role": "prefill"}, {"role": "decode", "tensor_parallel": 2}],
    "timeouts": LIMITS,
}
SPLIT_PREFILL = {
    "pools": [{"role": "prefill", "tensor_parallel": 2}, {"role": "decode"}],
    "timeouts": LIMITS,
}


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


def other_ranks(worker: Worker) -> tuple[int, ...]:
    leader, *others = worker.info.rank_pids
    assert leader == worker.process.pid
    return tuple(others)


def all_gone(pids: tuple[int, ...]) -> bool:
    return not any(map(alive, pids))


def test_kv_of_two_ranks_goes_to_one_process(start: Start, oracle: Oracle) -> None:
    cluster = start(**SPLIT_PREFILL)
    assert_same_tokens(cluster, oracle, seed=5)
    found = listeners(set(cluster.workers["prefill-0"].info.rank_pids))
    assert {address for address, _ in found} == {"127.0.0.1"}


def test_kv_of_one_process_goes_to_two_ranks_of_a_mixture_of_experts(
    start: Start, moe_folder: Path
) -> None:
    model = {"ref": str(moe_folder), "dtype": "float32"}
    assert_same_tokens(start(**SPLIT_DECODE, model=model), Oracle(moe_folder), seed=6)


def assert_same_tokens(cluster: Cluster, oracle: Oracle, seed: int) -> None:
    """Twice, so that the second time finds the first in the prefix caches."""
    vocab = oracle.config.vocab_size
    asked = [tuple(token % vocab for token in prompt) for prompt in prompts(seed)[:6]]
    sampling = Sampling(max_tokens=12, ignore_eos=True)

    async def run() -> None:
        async with Router(cluster) as router:
            for cached in (False, True):
                outs = await asyncio.gather(*(router.tokens(p, sampling) for p in asked))
                assert [tokens for tokens, _ in outs] == [oracle.tokens(p, 12) for p in asked]
                assert all(told.attempts == 1 and told.moved_blocks for _, told in outs)
                assert all(bool(told.cached_tokens) == cached for _, told in outs[1:])

    asyncio.run(run())
    cluster.settle()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_its_worker_and_no_stream(
    start: Start, oracle: Oracle, how: signal.Signals
) -> None:
    cluster = start(**SPLIT_DECODE)
    victim = cluster.workers["decode-0"]
    ranks = victim.info.rank_pids

    def harm() -> None:
        os.kill(other_ranks(victim)[0], how)
        victim.process.wait(DETECTION_S)

    outs = asyncio.run(streams_with(cluster, int(how), harm, 300))

    assert outs == [oracle.tokens(p, OUTPUT) for p in prompts(int(how))]
    assert victim.process.returncode not in (0, None)
    until(lambda: all_gone(ranks), DETECTION_S)
    cluster.restart("decode-0")
    assert cluster.workers["decode-0"].epoch > victim.epoch
    assert not set(cluster.workers["decode-0"].info.rank_pids) & set(ranks)
    assert_same_tokens(cluster, oracle, seed=100 + how)


def test_the_ranks_of_a_killed_leader_end_by_themselves(start: Start, oracle: Oracle) -> None:
    cluster = start(**SPLIT_DECODE)
    victim = cluster.workers["decode-0"]

    def harm() -> None:
        victim.kill()
        until(lambda: all_gone(other_ranks(victim)), DETECTION_S)

    outs = asyncio.run(streams_with(cluster, 42, harm, 300))

    assert outs == [oracle.tokens(p, OUTPUT) for p in prompts(42)]
    cluster.restart("decode-0")


def test_a_rank_that_cannot_start_is_named() -> None:
    spec = from_mapping(
        ClusterSpec,
        {"model": {"ref": "/no/such/model"}, "pools": [{"role": "hybrid", "tensor_parallel": 2}]},
    )
    gang = Gang(WorkerBoot(WorkerId("hybrid-0"), Role.HYBRID, Epoch(1), spec), 8, 4096)
    arena = MemfdArena.create(8, 4096, share=gang.spawn)
    try:
        with pytest.raises(WorkerLost, match=r"rank 1 \(pid \d+\) of 2 ended \(exit status 1\)"):
            gang.meet(torch.device("cpu"))
    finally:
        gang.stop(DETECTION_S)
        arena.close()


def test_idle_ranks_wait_without_computing_and_go_with_their_worker(start: Start) -> None:
    cluster = start(**SPLIT_DECODE)
    worker = cluster.workers["decode-0"]
    (rank,) = map(psutil.Process, other_ranks(worker))
    before = sum(rank.cpu_times()[:2])
    with pytest.raises(subprocess.TimeoutExpired):
        worker.process.wait(2.0)
    assert sum(rank.cpu_times()[:2]) - before < 0.2

    worker.stop()

    until(lambda: not alive(rank.pid), DETECTION_S)
    assert worker.process.returncode == 0
