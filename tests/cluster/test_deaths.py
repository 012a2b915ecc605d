"""Workers killed, stopped and replaced while streams run."""

import asyncio
import random
import signal
from collections.abc import Callable

import pytest

from core.errors import TriremeError
from core.sampling import Sampling
from tests.cluster.conftest import Start
from tests.rig.cluster import Cluster, Router
from tests.rig.tiny import VOCAB, Oracle

STREAMS = 16
OUTPUT = 150
LIMITS = {"token_s": 3.0, "prefill_s": 3.0, "lease_s": 2.0, "call_s": 1.0, "queue_s": 20.0}


def prompts(seed: int) -> list[tuple[int, ...]]:
    source = random.Random(seed)
    return [tuple(source.randrange(VOCAB) for _ in range(20 + 9 * i)) for i in range(STREAMS)]


async def streams_with(
    cluster: Cluster, seed: int, harm: Callable[[], None], when_streaming: int
) -> list[list[int] | BaseException]:
    """16 streams; `harm` strikes once that many tokens have arrived in total."""
    arrived = 0
    struck = asyncio.Event()

    async with Router(cluster) as router:

        async def one(prompt: tuple[int, ...]) -> list[int]:
            nonlocal arrived
            sampling = Sampling(max_tokens=OUTPUT, ignore_eos=True)
            out: list[int] = []
            async for batch in await router.dispatcher.generate(router.request(prompt, sampling)):
                out += (token.id for token in batch)
                arrived += len(batch)
                if arrived >= when_streaming:
                    struck.set()
            return out

        async def strike() -> None:
            await struck.wait()
            await asyncio.to_thread(harm)

        striker = asyncio.create_task(strike())
        async with asyncio.timeout(90):
            results = await asyncio.gather(*map(one, prompts(seed)), return_exceptions=True)
            await striker
    return results


@pytest.mark.parametrize(("victim", "when"), [("prefill-0", 5), ("decode-0", 400)])
def test_sigkill_in_the_middle_of_16_streams_changes_no_text(
    start: Start, oracle: Oracle, victim: str, when: int
) -> None:
    """The survivor takes over; the dead worker comes back as a new epoch and serves again."""
    cluster = start(timeouts=LIMITS)
    before = cluster.workers[victim].info.epoch
    outs = asyncio.run(streams_with(cluster, when, cluster.workers[victim].kill, when))
    assert outs == [oracle.tokens(p, OUTPUT) for p in prompts(when)]
    cluster.restart(victim)
    assert cluster.workers[victim].info.epoch > before
    again = asyncio.run(streams_with(cluster, when + 1, lambda: None, 0))
    assert again == [oracle.tokens(p, OUTPUT) for p in prompts(when + 1)]
    cluster.settle()


def test_a_frozen_decode_worker_is_found_and_left(start: Start, oracle: Oracle) -> None:
    cluster = start(timeouts=LIMITS)
    decode = cluster.workers["decode-0"]
    try:
        outs = asyncio.run(streams_with(cluster, 77, lambda: decode.signal(signal.SIGSTOP), 300))
    finally:
        decode.signal(signal.SIGCONT)
    assert outs == [oracle.tokens(p, OUTPUT) for p in prompts(77)]
    cluster.settle()


def test_when_nobody_is_left_each_stream_gets_one_typed_error(start: Start) -> None:
    cluster = start(timeouts={**LIMITS, "queue_s": 3.0})

    def harm() -> None:
        for worker in cluster.workers.values():
            worker.kill()

    outs = asyncio.run(streams_with(cluster, 99, harm, 300))
    assert all(isinstance(out, TriremeError) for out in outs), outs
    assert {out.code for out in outs} <= {"unavailable", "worker_lost"}
