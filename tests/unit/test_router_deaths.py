"""Workers that die, hang, or fail to move KV: what the client sees, and nothing left behind."""

import asyncio

import pytest

from core.errors import (
    DeadlineExceeded,
    InternalError,
    LeaseGone,
    Stage,
    TransferFailed,
    WorkerLost,
)
from core.ids import Epoch, WorkerId
from core.messages import (
    Prefill,
    Role,
)
from tests.fakes import vtime
from tests.fakes.fleet import Fate
from tests.fakes.rig import assert_whole, expected, request, rig

AT = {
    "reserving": 0.0005,
    "prefilling": 0.01,
    "attaching": 0.0345,
    "decoding": 0.07,
}
"""Seconds after its start at which an undisturbed request is in that state."""
AT_PEACE = {"p": ("attaching", "decoding"), "d": ()}
"""When the death of a worker costs nothing: its part is over."""


@pytest.mark.parametrize("spare", ["", "p1 d1"], ids=["last", "spare"])
@pytest.mark.parametrize("state", AT)
@pytest.mark.parametrize("victim", ["p", "d"])
def test_a_dying_worker_is_replaced_in_every_state(victim, state, spare):
    async def main():
        async with rig("p d") as r:
            ask = request(max_tokens=12)
            task = r.start(ask)
            await asyncio.sleep(AT[state])
            assert r.dispatcher.snapshot().live == {state: 1}
            for name in spare.split():
                r.fleet.add(name, Role.PREFILL if name[0] == "p" else Role.DECODE)
            r.fleet.kill(victim)
            result = await task
            a = result.accounting
            assert result.tokens == expected(ask)
            assert a.attempts == (1 if state in AT_PEACE[victim] else 2)
            kinds = [d.partition(":")[0] for d in a.degraded]
            replaced = {"p": "local_prefill", "d": "local_decode"}[victim]
            assert kinds == (["retried"] if spare else ["retried", replaced]) * (a.attempts - 1)

    vtime.run(main())


def test_the_stream_goes_on_over_a_restarted_worker():
    async def main():
        async with rig("h") as r:
            ask = request(max_tokens=20)
            task = r.start(ask)
            await asyncio.sleep(0.1)
            r.fleet.kill("h", restart_after_s=3.0)
            result = await task
            assert_whole(result, ask, 2, "retried:decode")
            assert result.accounting.cached_tokens == 0

    vtime.run(main())


@pytest.mark.parametrize("waiting", [0, 256])
def test_a_stream_that_ran_long_may_still_wait_for_another_worker(waiting):
    """Its queue deadline starts anew, and a full line does not turn it away."""

    async def main():
        limits = {"queue_s": 5.0}
        async with rig("h", router={"max_waiting": waiting}, timeouts=limits) as r:
            ask = request(max_tokens=1000)
            task = r.start(ask)
            await asyncio.sleep(6.0)
            r.fleet.kill("h", restart_after_s=3.0)
            assert_whole(await task, ask, 2, "retried:decode")

    vtime.run(main())


def test_the_late_loss_of_an_earlier_incarnation_is_ignored():
    async def main():
        async with rig("h") as r:
            ask = request()
            task = r.start(ask)
            await asyncio.sleep(0.05)
            r.dispatcher.on_lost(WorkerId("h"), Epoch(0), "late news")
            assert_whole(await task, ask, 1)

    vtime.run(main())


def test_the_loss_of_the_refuser_lets_the_parked_go_elsewhere_at_once():
    async def main():
        async with rig("p d") as r:
            r.worker("d").refuse, r.worker("d").retry_after_s = 10**6, 30.0
            task = r.start(request())
            await asyncio.sleep(0.1)
            r.fleet.kill("d")
            result = await asyncio.wait_for(task, 1.0)
            assert_whole(result, request(), 1, "local_decode")

    vtime.run(main())


def test_cached_tokens_are_the_first_completed_prefills():
    async def main():
        async with rig("h0 h1") as r:
            for worker, cached in zip(r.fleet.workers(), (3, 3), strict=True):
                worker.cached_tokens = cached
            ask = request(max_tokens=20)
            task = r.start(ask)
            await asyncio.sleep(0.1)
            (held,) = [w for w in r.fleet.workers() if w.held]
            (other,) = [w for w in r.fleet.workers() if not w.held]
            other.cached_tokens = 99
            r.fleet.kill(held.worker_id)
            assert (await task).accounting.cached_tokens == 3

    vtime.run(main())


def test_a_request_that_kills_workers_fails_once_with_the_last_error():
    async def main():
        async with rig("h0 h1 h2", lambda _, m: poison(m), router={"max_attempts": 3}) as r:
            result = await r.consume(request())
            assert isinstance(result.error, WorkerLost)
            assert result.accounting.attempts == 3
            assert r.dispatcher.counters.requests == {"worker_lost": 1}
            assert result.error.stage is Stage.PREFILL
            assert result.error.worker

    def poison(message):
        return Fate.KILL if isinstance(message, Prefill) else Fate.PASS

    vtime.run(main())


def test_a_failed_transfer_is_recomputed_on_the_decode_worker():
    async def main():
        async with rig("p d") as r:
            r.worker("p").transfer_fails = 1
            ask = request()
            result = await r.consume(ask)
            assert_whole(result, ask, 2, "retried:transfer", "local_prefill")
            assert result.accounting.prefill_worker == "d"
            assert r.cancelled_on() == {"d"}

    vtime.run(main())


def test_a_failed_attempt_gives_its_blocks_back_before_the_next_asks():
    async def main():
        async with rig("p d") as r:
            r.worker("d").slots = 1
            r.worker("p").transfer_fails = 1
            ask = request()
            assert_whole(await r.consume(ask), ask, 2, "retried:transfer", "local_prefill")
            assert r.dispatcher.counters.refusals == 0

    vtime.run(main())


def test_a_stalled_transfer_names_its_stage_and_is_recomputed():
    async def main():
        async with rig("p d", timeouts={"transfer_s": 1.0}) as r:
            r.worker("p").transfer_s = 1000.0
            ask = request()
            assert_whole(await r.consume(ask), ask, 2, "retried:transfer", "local_prefill")
            assert r.cancelled_on() == {"p", "d"}

    vtime.run(main())


def test_recompute_falls_back_to_others_when_the_decode_worker_is_full():
    async def main():
        async with rig("p d") as r:
            r.worker("p").transfer_fails = 1
            r.worker("d").retry_after_s = 30.0
            task = r.start(request())
            await asyncio.sleep(0.025)
            r.worker("d").slots = 0
            await asyncio.sleep(0.1)
            r.fleet.add("d1", Role.DECODE)
            result = await task
            assert result.tokens == expected(request())
            assert result.accounting.decode_worker == "d1"

    vtime.run(main())


@pytest.mark.parametrize("error", [LeaseGone("expired"), TransferFailed("x"), WorkerLost("peer")])
def test_a_prefill_that_is_given_up_starts_over(error):
    async def main():
        async with rig("p d") as r:
            r.worker("p").fail_with = error
            ask = request()
            result = await r.consume(ask)
            assert result.tokens == expected(ask)
            assert result.accounting.attempts == 2
            assert r.dispatcher.counters.retries == {"prefill": 1}

    vtime.run(main())


def test_an_error_that_no_retry_can_cure_ends_the_request():
    async def main():
        async with rig("p d") as r:
            r.worker("p").fail_with = InternalError("broken invariant")
            result = await r.consume(request())
            assert isinstance(result.error, InternalError)
            assert (result.error.worker, result.error.stage) == ("p", "prefill")
            assert result.accounting.attempts == 1

    vtime.run(main())


@pytest.mark.parametrize(
    ("workers", "hung", "at", "stage"),
    [
        ("p d", "d", 0.0005, "reserve"),
        ("p d", "p", 0.0005, "prefill"),
        ("p d", "p", 0.01, "prefill"),
        ("p d", "p", 0.029, "transfer"),
        ("p d", "d", 0.0345, "attach"),
        ("p d", "d", 0.07, "decode"),
        ("h", "h", 0.01, "prefill"),
        ("h", "h", 0.07, "decode"),
    ],
)
def test_a_hung_worker_costs_one_deadline_and_names_the_stage(workers, hung, at, stage):
    async def main():
        async with rig(workers) as r:
            ask = request(max_tokens=12)
            task = r.start(ask)
            await asyncio.sleep(at)
            r.worker(hung).hung = True
            r.fleet.add("h9", Role.HYBRID)
            result = await task
            assert result.tokens == expected(ask)
            assert result.accounting.attempts == 2
            assert result.accounting.degraded[0] == f"retried:{stage}"
            r.fleet.kill(hung)

    vtime.run(main())


def test_deadlines_on_the_only_worker_end_with_a_typed_error():
    async def main():
        async with rig("h", router={"max_attempts": 2}) as r:
            r.worker("h").hung = True
            result = await r.consume(request())
            assert isinstance(result.error, DeadlineExceeded)
            assert (result.error.stage, result.error.worker) == ("prefill", "h")
            r.fleet.kill("h")

    vtime.run(main())
