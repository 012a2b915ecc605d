"""Requests given up at random moments: nothing is held for them afterwards, anywhere."""

import asyncio
import json
import random
import subprocess
import sys
from dataclasses import asdict

from core.ids import AttemptKey, RequestId, WorkerId
from core.messages import Reserve
from core.sampling import Sampling
from core.spec import to_mapping
from tests.cluster.conftest import Start
from tests.rig.cluster import Router, leftovers
from tests.rig.tiny import VOCAB
from tests.rig.workers import ROOT

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


def test_a_router_that_is_killed_takes_its_requests_with_it(start: Start) -> None:
    cluster = start(kv={"blocks": 120}, batch={"chunk_tokens": 16, "max_running": 8})
    wanted = {
        "spec": to_mapping(cluster.spec),
        "workers": [asdict(w.info) for w in cluster.workers.values()],
        "requests": 12,
    }
    with subprocess.Popen(
        [sys.executable, "-m", "tests.rig.router_main"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as router:
        try:
            router.stdin.write(json.dumps(wanted) + "\n")
            router.stdin.flush()
            assert router.stdout.readline() == "running\n"
            assert leftovers(cluster.workers["decode-0"].report())
        finally:
            router.kill()
    cluster.settle()


def test_a_lease_nobody_renews_expires(start: Start) -> None:
    """The router lives on but forgot: it neither cancels nor renews."""
    cluster = start(kv={"blocks": 120}, batch={"chunk_tokens": 16, "max_running": 8})

    async def run() -> None:
        async with Router(cluster) as router:
            decode = router.fleet.port(WorkerId("decode-0"))
            assert decode is not None
            await decode.call(Reserve(AttemptKey(RequestId("forgotten"), 0), (1,) * 50), 2.0)
            assert cluster.workers["decode-0"].report()["leased_blocks"] == 4
            await asyncio.to_thread(cluster.settle)

    asyncio.run(run())
    counters = {c["name"]: c["value"] for c in cluster.workers["decode-0"].report()["counters"]}
    assert counters["leases_expired"] == 1
