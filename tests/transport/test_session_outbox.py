"""What waits to be sent: order, the newest report, the bound, the end."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.messages import Role, WorkerReport
from tests.transport.session_peer import run
from transport.outbox import Outbox, Sealed


def frame(i: int) -> Sealed:
    return Sealed("Grant", str(i).encode())


def report(i: int) -> WorkerReport:
    return WorkerReport("worker-0", Role.DECODE, 7, free_blocks=i)


async def drain(outbox: Outbox) -> list[object]:
    items = []
    try:
        while (item := await outbox.next(0.0)) is not None:
            items.append(item)
    except TimeoutError:
        pass
    return items


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(("frame", "report", "take")), max_size=30))
def test_frames_keep_their_order_and_reports_collapse_to_the_newest(steps):
    async def scenario():
        outbox = Outbox(100, lambda: None)
        sent, got, newest = [], [], None
        for i, step in enumerate([*steps, "take"]):
            if step == "frame":
                sent.append(frame(i))
                assert outbox.put(sent[-1])
            elif step == "report":
                newest = report(i)
                assert outbox.put(newest)
            else:
                await asyncio.sleep(0)
                items = await drain(outbox)
                got += [item for item in items if isinstance(item, Sealed)]
                assert items[len(items) - (newest is not None) :] == [newest] * (newest is not None)
                newest = None
        assert got == sent

    run(scenario())


def test_the_last_item_allowed_fits_and_one_more_closes_the_outbox():
    async def scenario():
        full = []
        outbox = Outbox(3, lambda: full.append(True))
        assert all(outbox.put(frame(i)) for i in range(3))
        assert outbox.put(report(0))
        assert not outbox.put(frame(3))
        assert not outbox.put(report(1))
        await asyncio.sleep(0)
        assert full == [True]
        assert await outbox.next(1.0) == frame(0)

    run(scenario())


def test_a_closed_outbox_hands_out_what_waits_and_then_none():
    async def scenario():
        outbox = Outbox(10, lambda: None)
        outbox.put(frame(1))
        outbox.put_first(frame(0))
        outbox.put(report(2))
        outbox.close()
        outbox.close()
        assert not outbox.put(frame(3))
        assert [await outbox.next(1.0) for _ in range(5)] == [
            frame(0),
            frame(1),
            report(2),
            None,
            None,
        ]

    run(scenario())


def test_waiting_for_an_item_has_a_deadline_and_wakes_for_one():
    async def scenario():
        outbox = Outbox(10, lambda: None)
        with pytest.raises(TimeoutError):
            await outbox.next(0.01)
        waiting = asyncio.create_task(outbox.next(5.0))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(outbox.put, frame(0))
        assert await waiting == frame(0)
        waiting = asyncio.create_task(outbox.next(5.0))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(outbox.close)
        assert await waiting is None

    run(scenario())


def test_a_burst_from_another_thread_wakes_the_loop_once():
    async def scenario():
        loop = asyncio.get_running_loop()
        wakes = []
        outbox = Outbox(1000, lambda: None)
        original = loop.call_soon_threadsafe

        def counting(callback, *arguments, **options):
            wakes.append(callback)
            return original(callback, *arguments, **options)

        loop.call_soon_threadsafe = counting
        for i in range(500):
            outbox.put(frame(i))
        assert len(wakes) == 1
        assert [await outbox.next(1.0) for _ in range(500)] == [frame(i) for i in range(500)]

    run(scenario())
