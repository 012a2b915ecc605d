"""Clients that go away at any moment, and a router that shuts down."""

import asyncio
import gc
import random

import pytest

from core.errors import (
    Unavailable,
)
from tests.fakes import vtime
from tests.fakes.rig import request, rig


@pytest.mark.parametrize("after_s", [0.0, 0.0005, 0.002, 0.01, 0.023, 0.028, 0.036, 0.08])
@pytest.mark.parametrize("how", ["aclose", "cancel", "garbage"])
@pytest.mark.parametrize("workers", ["p d", "h"])
def test_a_client_that_goes_away_frees_everything_at_once(workers, how, after_s):
    async def main():
        async with rig(workers) as r:
            generation = await r.dispatcher.generate(request(max_tokens=1000))

            async def read(stream):
                async for _ in stream:
                    pass

            reader = asyncio.create_task(read(generation)) if how == "cancel" else None
            await asyncio.sleep(after_s)
            if reader is not None:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
            elif how == "aclose":
                await generation.aclose()
                await generation.aclose()
                assert r.dispatcher.snapshot().in_flight == {}
            del generation, reader
            gc.collect()
            await asyncio.sleep(0.05)
            assert [w.held for w in r.fleet.workers()] == [{} for _ in r.fleet.workers()]
            assert r.dispatcher.counters.requests == {"cancelled": 1}

    vtime.run(main())


def test_aclose_ends_a_waiting_consumer():
    async def main():
        async with rig() as r:
            generation = await r.dispatcher.generate(request())
            waiting = asyncio.create_task(anext(generation))
            await asyncio.sleep(0.005)
            await generation.aclose()
            with pytest.raises(StopAsyncIteration):
                await waiting

    vtime.run(main())


def test_close_ends_every_request_with_unavailable():
    async def main():
        async with rig(workers="p d") as r:
            r.worker("d").slots = 2
            tasks = [r.start(request(f"r{i}", max_tokens=1000)) for i in range(4)]
            await asyncio.sleep(0.1)
            await r.dispatcher.close()
            for result in await asyncio.gather(*tasks):
                assert isinstance(result.error, Unavailable)
            with pytest.raises(Unavailable):
                await r.dispatcher.generate(request("late"))

    vtime.run(main())


def test_two_hundred_cancels_at_random_moments_leave_nothing():
    rng = random.Random(7)

    async def main():
        async with rig("p0 p1 d0 d1") as r:
            for worker in r.fleet.workers():
                worker.slots = 12
            tasks = []
            for i in range(200):
                tasks.append(r.start(request(f"r{i}", max_tokens=rng.randint(1, 30))))
                loop = asyncio.get_running_loop()
                loop.call_later(rng.uniform(0, 0.3), tasks[-1].cancel)
                await asyncio.sleep(rng.uniform(0, 0.01))
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert len(results) == 200
            await asyncio.sleep(0.1)
            assert all(w.held == {} for w in r.fleet.workers())
            outcomes = r.dispatcher.counters.requests
            assert outcomes["cancelled"] > 50
            assert outcomes["finished"] > 20
            assert set(outcomes) == {"cancelled", "finished"}

    vtime.run(main())
