"""Messages that are lost, late or repeated."""

import asyncio

import pytest

from core.errors import (
    TransferFailed,
)
from core.messages import (
    Accepted,
    Attach,
    AttemptFailed,
    Cancel,
    Grant,
    Prefill,
    PrefillDone,
    Reserve,
    StepEvents,
)
from tests.fakes import vtime
from tests.fakes.fleet import Fate, nth
from tests.fakes.rig import expected, request, rig


@pytest.mark.parametrize("workers", ["p d", "h"])
@pytest.mark.parametrize("fate", [Fate.DUPLICATE, Fate.LATE, Fate.DROP], ids=lambda f: f.value)
@pytest.mark.parametrize("number", [0, 1, 4, 7])
def test_token_events_that_are_lost_late_or_repeated_change_nothing(workers, fate, number):
    async def main():
        async with rig(workers, nth(StepEvents, number, fate=fate)) as r:
            ask = request()
            result = await r.consume(ask)
            assert result.tokens == expected(ask)
            harmless = number == 0 or fate is Fate.DUPLICATE or (fate is Fate.LATE and number == 7)
            assert result.accounting.attempts == (1 if harmless else 2)

    vtime.run(main())


@pytest.mark.parametrize("fate", [Fate.DUPLICATE, Fate.LATE, Fate.DROP], ids=lambda f: f.value)
@pytest.mark.parametrize(
    "kind", [Reserve, Grant, Prefill, Accepted, PrefillDone, Attach], ids=lambda k: k.__name__
)
def test_control_messages_that_are_lost_late_or_repeated_change_nothing(kind, fate):
    async def main():
        async with rig("p d", nth(kind, 0, fate=fate)) as r:
            ask = request()
            result = await r.consume(ask)
            assert result.tokens == expected(ask)
            assert result.accounting.attempts == 1 + (fate is Fate.DROP)
            if fate is not Fate.DROP:
                assert result.accounting.moved_blocks == 3

    vtime.run(main())


def test_a_lost_failure_notice_is_covered_by_the_deadline():
    async def main():
        async with rig("p d", nth(AttemptFailed, 0, fate=Fate.DROP)) as r:
            r.worker("p").fail_with = TransferFailed("x")
            ask = request()
            result = await r.consume(ask)
            assert result.tokens == expected(ask)
            assert result.accounting.attempts == 2

    vtime.run(main())


def test_a_lost_cancel_is_repeated():
    async def main():
        async with rig("h", nth(Cancel, 0, fate=Fate.DROP)) as r:
            generation = await r.dispatcher.generate(request(max_tokens=1000))
            await anext(generation)
            await generation.aclose()
            await asyncio.sleep(4.0)
            assert r.worker("h").held == {}
            counters = r.dispatcher.counters
            assert (counters.cancels, counters.cancel_errors) == (1, 1)

    vtime.run(main())


def test_when_no_cancel_arrives_the_lease_ends_it():
    async def main():
        async with rig("h", nth(Cancel, *range(99), fate=Fate.DROP)) as r:
            generation = await r.dispatcher.generate(request(max_tokens=10**6))
            await anext(generation)
            await generation.aclose()
            await asyncio.sleep(9.0)
            assert r.worker("h").held
            await asyncio.sleep(2.0)
            assert r.worker("h").held == {}
            assert r.dispatcher.counters.unknown_events > 100

    vtime.run(main())
