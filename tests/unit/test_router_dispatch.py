"""One request, or a few, over well-behaved workers."""

import asyncio
import json
from dataclasses import asdict

import pytest

from core.errors import BadRequest, Overloaded, Unavailable
from core.ids import Epoch, WorkerId
from core.messages import Attach, Cancel, FinishReason, Prefill, Renew, Reserve, Role, WorkerReport
from core.trace import TraceEvent
from router.request import Token
from router.stages import durations
from tests.fakes import vtime
from tests.fakes.rig import expected, request, rig


@pytest.mark.parametrize("workers", ["p d", "h", "p0 p1 d0 d1", "p h", "h d", "h0 h1"])
def test_tokens_equal_the_plain_loop(workers):
    async def main():
        async with rig(workers) as r:
            asks = [request(f"r{i}", prompt=tuple(range(i, i + 9))) for i in range(6)]
            results = await asyncio.gather(*(r.consume(ask) for ask in asks))
            for ask, result in zip(asks, results, strict=True):
                assert result.tokens == expected(ask)
                assert result.accounting.finish is FinishReason.LENGTH
            assert r.dispatcher.counters.requests == {"finished": 6}
            assert not r.dispatcher.counters.degraded

    vtime.run(main())


def test_disaggregated_request_is_accounted_and_traced():
    async def main():
        async with rig("p d") as r:
            r.worker("p").cached_tokens = 4
            result = await r.consume(request())
            a = result.accounting
            assert (a.prompt_tokens, a.cached_tokens, a.completion_tokens) == (10, 4, 8)
            assert (a.moved_blocks, a.moved_bytes, a.mover) == (3, 300, "memory")
            assert (a.attempts, a.prefill_worker, a.decode_worker) == (1, "p", "d")
            assert a.degraded == []
            assert [event for event, _ in a.trace.events] == [
                TraceEvent.RECEIVED,
                TraceEvent.PLACED,
                TraceEvent.RESERVED,
                TraceEvent.PREFILL_ACCEPTED,
                TraceEvent.FIRST_TOKEN,
                TraceEvent.TRANSFERRED,
                TraceEvent.ATTACHED,
                TraceEvent.SECOND_TOKEN,
                TraceEvent.ENDED,
            ]
            parts = durations(a.trace, a.trace.events[0][1])
            assert parts["prefill"] == pytest.approx(0.021, abs=0.002)
            assert r.sent(Cancel) == []

    vtime.run(main())


def test_local_request_moves_nothing():
    async def main():
        async with rig("h") as r:
            result = await r.consume(request())
            assert result.accounting.moved_blocks == 0
            assert result.accounting.prefill_worker == result.accounting.decode_worker == "h"
            assert r.sent(Reserve) == r.sent(Attach) == []

    vtime.run(main())


@pytest.mark.parametrize("workers", ["p d", "h"])
def test_first_token_that_is_the_last_frees_the_decode_side(workers):
    async def main():
        async with rig(workers) as r:
            for worker in r.fleet.workers():
                worker.cached_tokens = 4
            ask = request(max_tokens=1)
            result = await r.consume(ask)
            assert result.tokens == expected(ask)
            assert result.accounting.cached_tokens == 4
            assert result.accounting.finish is FinishReason.LENGTH
            assert r.sent(Attach) == []
            await asyncio.sleep(0.1)
            assert [w.held for w in r.fleet.workers()] == [{} for _ in r.fleet.workers()]

    vtime.run(main())


def test_stop_token_ends_with_stop():
    async def main():
        async with rig() as r:
            whole = expected(request())
            ask = request(stop_token_ids=(whole[3],))
            result = await r.consume(ask)
            assert result.tokens == whole[: whole.index(whole[3]) + 1]
            assert result.accounting.finish is FinishReason.STOP

    vtime.run(main())


def test_first_token_does_not_wait_for_the_transfer():
    async def main():
        async with rig() as r:
            r.worker("p").transfer_s = 2.0
            generation = await r.dispatcher.generate(request())
            start = vtime.now()
            assert await anext(generation) == (Token(expected(request())[0]),)
            assert vtime.now() - start < 0.5
            await generation.aclose()

    vtime.run(main())


def test_short_prompts_skip_the_prefill_pool():
    async def main():
        async with rig("p d", router={"disagg_min_tokens": 8}) as r:
            short = await r.consume(request("short", prompt=(1, 2, 3)))
            long = await r.consume(request("long"))
            assert short.accounting.prefill_worker == "d"
            assert short.accounting.degraded == []
            assert long.accounting.prefill_worker == "p"

    vtime.run(main())


def test_load_is_counted_before_dispatch():
    """A burst in one tick spreads evenly: nobody waits for a report to see the others."""

    async def main():
        async with rig("p0 p1 p2 d0 d1 d2") as r:
            tasks = [r.start(request(f"r{i}")) for i in range(30)]
            await asyncio.sleep(0.01)
            jobs = [worker for worker, _ in r.sent(Prefill)]
            assert {jobs.count(p) for p in ("p0", "p1", "p2")} == {10}
            assert set(r.dispatcher.snapshot().in_flight.values()) == {100}
            assert r.dispatcher.snapshot().live == {"prefilling": 30}
            await asyncio.gather(*tasks)

    vtime.run(main())


def test_the_prefill_workers_load_ends_with_its_part():
    async def main():
        async with rig("p d") as r:
            task = r.start(request())
            await asyncio.sleep(0.02)
            assert r.dispatcher.snapshot().in_flight == {"p": 10, "d": 10}
            await asyncio.sleep(0.04)
            assert r.dispatcher.snapshot().in_flight == {"d": 10}
            await task

    vtime.run(main())


def test_counters_and_snapshot_are_plain_data():
    async def main():
        async with rig("p d") as r:
            r.worker("p").transfer_fails = 1
            task = r.start(request())
            await asyncio.sleep(0.01)
            snapshot = json.loads(json.dumps(asdict(r.dispatcher.snapshot())))
            assert snapshot["live"] == {"prefilling": 1}
            await task
            counters = json.loads(json.dumps(asdict(r.dispatcher.counters)))
            assert counters["requests"] == {"finished": 1}
            assert counters["retries"] == {"transfer": 1}
            assert counters["degraded"] == {"retried:transfer": 1, "local_prefill": 1}

    vtime.run(main())


def test_long_streams_are_renewed_and_survive_their_lease():
    async def main():
        async with rig(timeouts={"lease_s": 2.0}) as r:
            for worker in r.fleet.workers():
                worker.lease_s = 2.0
            r.worker("d").step_s = 1.5
            ask = request()
            result = await r.consume(ask)
            assert result.tokens == expected(ask)
            assert result.accounting.attempts == 1
            keys = {key for _, renew in r.sent(Renew) for key in renew.keys}
            assert keys == {("r", 1)}

    vtime.run(main())


def test_a_role_changed_at_run_time_is_followed():
    async def main():
        async with rig("p d h") as r:
            r.worker("p").draining = True
            r.worker("p").report()
            r.worker("h").role = Role.PREFILL
            r.worker("h").report()
            await asyncio.sleep(0.01)
            result = await r.consume(request())
            assert result.accounting.prefill_worker == "h"
            assert result.accounting.decode_worker == "d"

    vtime.run(main())


def test_no_worker_is_503_at_once():
    async def main():
        async with rig("") as r:
            with pytest.raises(Unavailable):
                await r.dispatcher.generate(request())
            assert r.dispatcher.counters.requests == {"unavailable": 1}

    vtime.run(main())


def test_only_draining_workers_is_503():
    async def main():
        async with rig("h") as r:
            r.worker("h").draining = True
            r.worker("h").report()
            await asyncio.sleep(0.01)
            with pytest.raises(Unavailable):
                await r.dispatcher.generate(request())

    vtime.run(main())


def test_news_of_an_earlier_incarnation_changes_nothing():
    async def main():
        async with rig("h") as r:
            stale = WorkerReport(WorkerId("h"), Role.HYBRID, Epoch(0), draining=True)
            r.dispatcher.on_event(WorkerId("h"), stale)
            assert (await r.consume(request())).tokens == expected(request())

            r.worker("h").draining = True
            r.worker("h").report()
            await asyncio.sleep(0.01)
            r.dispatcher.on_lost(WorkerId("h"), Epoch(0), "late news")
            with pytest.raises(Unavailable):
                await r.dispatcher.generate(request())

    vtime.run(main())


def test_an_id_in_use_is_a_bad_request_and_harms_nobody():
    async def main():
        async with rig() as r:
            first = r.start(request())
            await asyncio.sleep(0.03)
            with pytest.raises(BadRequest) as caught:
                await r.dispatcher.generate(request())
            assert caught.value.field == "request_id"
            assert (await first).tokens == expected(request())

    vtime.run(main())


def test_bad_request_of_a_worker_ends_at_once():
    async def main():
        async with rig() as r:
            r.worker("d").fail_with = BadRequest("too long", field="messages")
            result = await r.consume(request())
            assert isinstance(result.error, BadRequest)
            assert (result.error.worker, result.error.stage) == ("d", "reserve")
            assert result.accounting.attempts == 1

    vtime.run(main())


def test_a_broken_router_still_ends_the_request(monkeypatch):
    async def main():
        async with rig() as r:
            monkeypatch.setattr("router.chooser.rank", lambda *_: 1 / 0)
            result = await r.consume(request())
            assert result.error.code == "internal_error"
            assert "ZeroDivisionError" in result.error.message

    vtime.run(main())


def test_the_whole_line_is_429():
    async def main():
        async with rig("h", router={"max_waiting": 3}) as r:
            r.worker("h").slots = 1
            tasks = [r.start(request(f"r{i}")) for i in range(5)]
            results = await asyncio.gather(*tasks)
            errors = [x.error for x in results if x.error]
            assert len(errors) == 1
            assert isinstance(errors[0], Overloaded)
            assert errors[0].retry_after_s > 0

    vtime.run(main())
