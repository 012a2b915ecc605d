"""Requests given up at random moments: nothing is held for them afterwards, anywhere."""

import asyncio
import random

from core.messages import Sampling
from tests.cluster.conftest import Start
from tests.rig.cluster import Router
from tests.rig.tiny import VOCAB

CANCELLED = 200


def test_200_cancels_at_random_moments_leave_nothing(start: Start) -> None:
    """Few slots and blocks, so that every state is met: queued, reserving, prefilling,
    mid-transfer, attached, decoding."""
    cluster = start(kv={"blocks": 120}, batch={"chunk_tokens": 16, "max_running": 8})
    source = random.Random(17)
    seen: set[str] = set()

    async def run() -> None:
        async with Router(cluster) as router:
            watcher = asyncio.create_task(watch(router))
            for _ in range(CANCELLED // 20):
                await asyncio.gather(*(one(router) for _ in range(20)))
            watcher.cancel()
            assert not router.dispatcher.snapshot().live
            assert not any(router.dispatcher.snapshot().in_flight.values())
            # Nobody is left to renew, but the books must balance before any lease runs out.
            await asyncio.to_thread(cluster.settle)

    async def one(router: Router) -> None:
        prompt = [source.randrange(VOCAB) for _ in range(source.choice((3, 40, 150, 400)))]
        request = router.request(prompt, Sampling(max_tokens=200, ignore_eos=True))
        await router.cancelled(request, after_s=source.uniform(0.0, 0.6) ** 2)

    async def watch(router: Router) -> None:
        while True:
            seen.update(router.dispatcher.snapshot().live)
            await asyncio.sleep(0.005)

    asyncio.run(run())
    assert {"queued", "prefilling", "decoding"} <= seen


def test_a_router_that_vanishes_takes_its_requests_with_it(start: Start) -> None:
    cluster = start(kv={"blocks": 120}, batch={"chunk_tokens": 16, "max_running": 8})

    async def run() -> None:
        router = Router(cluster, "short-lived")
        await router.connect()
        for i in range(12):
            request = router.request([i] * 100, Sampling(max_tokens=500, ignore_eos=True))
            await router.dispatcher.generate(request)
        await asyncio.sleep(0.3)
        for port in list(router.fleet.ports()):
            port.session._channel._channel.close()  # the process dies: no goodbye

    asyncio.run(run())
    cluster.settle()


def test_attempts_nobody_renews_expire(start: Start) -> None:
    """A router that lives on but lost its mind: it neither cancels nor renews."""
    cluster = start(kv={"blocks": 120}, batch={"chunk_tokens": 16, "max_running": 8})

    async def run() -> None:
        async with Router(cluster) as router:
            router.faults.set([])
            for port in router.fleet.ports():
                if port.info.role == "decode":
                    from core.ids import AttemptKey, RequestId
                    from core.messages import Reserve

                    await port.call(Reserve(AttemptKey(RequestId("forgotten"), 0), (1,) * 50), 2)
                    held = cluster.workers["decode-0"].report()["leased_blocks"]
                    assert held == 4
            await asyncio.to_thread(cluster.settle)

    asyncio.run(run())
