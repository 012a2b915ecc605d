"""Refusals, the waiting line, and running out of workers."""

import asyncio

import pytest

from core.errors import (
    Overloaded,
    Stage,
    Unavailable,
)
from core.messages import (
    Prefill,
    Role,
)
from tests.fakes import vtime
from tests.fakes.fleet import Fate
from tests.fakes.rig import assert_whole, expected, request, rig


def test_refusal_goes_to_the_next_candidate_and_is_no_attempt():
    async def main():
        async with rig("p0 p1 d0 d1") as r:
            for worker in r.fleet.workers():
                worker.refuse = 1
            ask = request()
            assert_whole(await r.consume(ask), ask, 1)
            assert r.dispatcher.counters.refusals >= 1

    vtime.run(main())


def test_a_prefill_refusal_frees_the_reserved_lease():
    async def main():
        async with rig("p0 p1 d") as r:
            r.worker("p0").refuse = r.worker("p1").refuse = 1
            task = r.start(request())
            await asyncio.sleep(0.02)
            assert r.cancelled_on() == {"d"}
            assert r.worker("d").held == {}
            assert r.dispatcher.snapshot().waiting == 1
            assert (await task).tokens == expected(request())

    vtime.run(main())


def test_parked_requests_are_served_in_order_of_arrival():
    async def main():
        async with rig("h") as r:
            r.worker("h").slots = 1
            asks = [request(f"r{i}") for i in range(6)]
            order = []

            async def client(ask):
                result = await r.consume(ask)
                order.append(ask.request_id)
                return result

            tasks = []
            for ask in asks:
                tasks.append(asyncio.create_task(client(ask)))
                await asyncio.sleep(0.03)
            for ask, result in zip(asks, await asyncio.gather(*tasks), strict=True):
                assert_whole(result, ask, 1)
            assert order == [ask.request_id for ask in asks]

    vtime.run(main())


def test_a_freed_worker_is_used_without_waiting_for_the_hint():
    async def main():
        async with rig("h") as r:
            r.worker("h").slots, r.worker("h").retry_after_s = 1, 30.0
            first, second = r.start(request("a")), r.start(request("b"))
            await first
            start = vtime.now()
            await second
            assert vtime.now() - start < 0.5

    vtime.run(main())


def test_parked_requests_run_side_by_side_once_there_is_room():
    async def main():
        async with rig("h") as r:
            r.worker("h").slots, r.worker("h").retry_after_s = 0, 30.0
            tasks = [r.start(request(f"r{i}", max_tokens=30)) for i in range(3)]
            await asyncio.sleep(0.1)
            assert r.dispatcher.snapshot().waiting == 3
            r.worker("h").slots = 3
            r.worker("h").report()
            await asyncio.sleep(0.1)
            assert r.dispatcher.snapshot().live == {"decoding": 3}
            await asyncio.gather(*tasks)

    vtime.run(main())


def test_without_any_news_the_hint_is_obeyed():
    offered = []

    def watch(_, message):
        if isinstance(message, Prefill):
            offered.append(vtime.now())
        return Fate.PASS

    async def main():
        async with rig("h", watch) as r:
            r.worker("h").refuse, r.worker("h").retry_after_s = 1, 0.5
            ask = request()
            assert_whole(await r.consume(ask), ask, 1)
            assert offered[1] - offered[0] == pytest.approx(0.5, abs=0.01)

    vtime.run(main())


def test_a_refusing_prefill_pool_does_not_make_the_router_spin():
    """Its own reserve and cancel change the decode worker's report; that is no news."""

    async def main():
        async with rig("p d", timeouts={"queue_s": 10.0}) as r:
            r.worker("p").refuse = 10**6
            r.worker("p").retry_after_s = 1.0
            result = await r.consume(request())
            assert isinstance(result.error, Overloaded)
            assert 10 <= len(r.sent(Prefill)) <= 12

    vtime.run(main())


def test_a_new_worker_takes_what_is_parked():
    async def main():
        async with rig("h") as r:
            r.worker("h").refuse, r.worker("h").retry_after_s = 10**6, 30.0
            task = r.start(request())
            await asyncio.sleep(1.0)
            r.fleet.add("h2", Role.HYBRID)
            result = await asyncio.wait_for(task, 1.0)
            assert result.accounting.decode_worker == "h2"

    vtime.run(main())


def test_overload_ends_in_429_at_the_queue_deadline():
    async def main():
        async with rig("p d", timeouts={"queue_s": 5.0}) as r:
            r.worker("d").refuse = 10**6
            result = await r.consume(request())
            assert isinstance(result.error, Overloaded)
            assert result.error.stage is Stage.QUEUE
            assert "full" in result.error.message
            assert 5.0 <= vtime.now() < 9.0

    vtime.run(main())


def test_losing_all_workers_ends_in_503_at_the_queue_deadline():
    async def main():
        async with rig("h", timeouts={"queue_s": 5.0}) as r:
            task = r.start(request(max_tokens=1000))
            await asyncio.sleep(0.1)
            r.fleet.kill("h")
            result = await task
            assert isinstance(result.error, Unavailable)
            assert result.tokens == expected(request(max_tokens=1000))[: len(result.tokens)]
            assert result.tokens

    vtime.run(main())
