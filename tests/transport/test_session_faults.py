"""Every injected fault on every message: each call has exactly one outcome, in time."""

import asyncio
import time

import pytest

from core.errors import DeadlineExceeded, Refused, TriremeError, WorkerLost
from core.messages import Abort, Renew
from core.spec import FaultSpec
from tests.transport.session_peer import (
    CALL_S,
    CALLS,
    EVENTS,
    GRANT,
    HELLO,
    KEY,
    Client,
    Worker,
    ask,
    eventually,
    process,
    run,
    served,
)
from transport.codec import MESSAGE_CLASSES
from transport.faulty import FaultInjector

DEADLINE_S = 1.0
SPARE_S = 3.0
"""What a busy machine may add to a deadline."""

ANSWERS = ("Welcome", "Grant", "Accepted", "Fault")
CALL_NAMES = ("Hello", "Reserve", "Prefill", "Attach", "Cancel")
SILENT = ("drop", "kill")
HARMLESS = ("delay", "duplicate", "reorder")
BREAKING = ("truncate", "corrupt")


async def outcome(awaitable):
    """The value or the typed error; anything else, a hang included, fails the test."""
    start = time.monotonic()
    try:
        return await asyncio.wait_for(awaitable, DEADLINE_S + SPARE_S)
    except TriremeError as error:
        return error
    finally:
        assert time.monotonic() - start < DEADLINE_S + SPARE_S


async def converse(session) -> list[object]:
    """Every kind of call, notice and event once; what each call came to."""
    calls = [*CALLS[1:], ask("raise refused"), ask("events")]
    outcomes = [asyncio.ensure_future(outcome(session.call(c, DEADLINE_S))) for c in calls]
    for notice in (Renew((KEY,)), Abort(KEY, "lease", "")):
        try:
            await session.notify(notice)
        except WorkerLost:
            break
    return await asyncio.gather(*outcomes)


async def hit(action: str, name: str) -> None:
    """One session with one fault, then a healthy one with the same worker."""
    faults = FaultInjector([FaultSpec(name, action, 0, 1, 0.05)], kill=lambda: None)
    async with served(faults=faults) as pair:
        client = Client()
        opened = await outcome(client.connect(pair.address, HELLO, faults, DEADLINE_S))
        replies = []
        if name in ("Hello", "Welcome"):
            check(action, [opened], affected=True)
        if not isinstance(opened, Exception):
            pair.clients.append(client)
            replies = await converse(client.session)
            if name not in ("Hello", "Welcome"):
                check(action, replies, affected=name in CALL_NAMES + ANSWERS)
        if action in BREAKING and replies:
            await eventually(lambda: len(client.losses) == 1)
        assert len(client.losses) <= 1
        assert faults.hits == (1,)
        executed = [type(c).__name__ for c in pair.worker.calls]
        assert len(executed) <= 5
        assert all(executed.count(n) <= 1 for n in CALL_NAMES if n != "Reserve")
        faults.set(())
        healthy = await pair.client()
        assert await healthy.session.call(ask(), CALL_S) == GRANT
    assert sorted(pair.worker.closed) == sorted(s.owner for s in pair.worker.sessions)


def check(action: str, replies: list[object], affected: bool) -> None:
    """affected: the fault hits a call or its answer, so that one caller must notice."""
    errors = [r for r in replies if isinstance(r, Exception) and not isinstance(r, Refused)]
    kinds = {type(e) for e in errors}
    if action in HARMLESS or (action in SILENT and not affected):
        assert errors == []
    elif action in SILENT:
        assert len(errors) == 1
        assert kinds == {DeadlineExceeded}
    else:
        assert kinds <= {WorkerLost}
        assert errors or not affected


@pytest.mark.parametrize("action", [*SILENT, *HARMLESS, *BREAKING])
def test_each_call_has_one_outcome_whatever_message_is_hit(action):
    async def scenario():
        await asyncio.gather(*(hit(action, kind.__name__) for kind in MESSAGE_CLASSES))

    run(scenario())


@pytest.mark.parametrize("name", ["Reserve", "Grant"])
def test_a_repeated_call_runs_once_and_a_repeated_answer_counts_once(name):
    async def scenario():
        faults = FaultInjector([FaultSpec(name, "duplicate", count=0)])
        async with served(faults=faults) as pair:
            client = await pair.client(faults=faults)
            for i in range(5):
                reply = await client.session.call(ask(request=f"r{i}"), CALL_S)
                assert reply.key.request_id == f"r{i}"
            assert len(pair.worker.calls) == 5
            await eventually(lambda: client.session.counts.unknown_replies == 5)
            assert pair.server.counts.duplicate_calls == (5 if name == "Reserve" else 0)

    run(scenario())


def test_a_call_repeated_while_it_runs_is_not_started_again():
    async def scenario():
        faults = FaultInjector([FaultSpec("Reserve", "duplicate")])
        async with served() as pair:
            client = await pair.client(faults=faults)
            assert await client.session.call(ask("wait 0.2"), CALL_S) == GRANT
            assert len(pair.worker.calls) == 1
            assert pair.server.counts.duplicate_calls == 1
            assert client.session.counts.unknown_replies == 0

    run(scenario())


def test_reordered_events_arrive_swapped_and_the_last_one_on_its_own():
    async def scenario():
        faults = FaultInjector()
        async with served(faults=faults) as pair:
            client = await pair.client()
            faults.set([FaultSpec("*", "reorder", delay_s=0.1), FaultSpec("*", "reorder", skip=1)])
            for event in EVENTS[:3]:
                pair.worker.sessions[0].send(event)
            await eventually(lambda: len(client.events) == 3)
            assert client.events == [EVENTS[1], EVENTS[0], EVENTS[2]]

    run(scenario())


@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("action", BREAKING)
def test_a_damaged_frame_ends_the_session_with_a_protocol_error_on_both_sides(action, side):
    async def scenario():
        faults = FaultInjector([FaultSpec("Reserve" if side == "client" else "Grant", action)])
        async with served(faults=faults) as pair:
            client = await pair.client(faults=faults)
            with pytest.raises(WorkerLost, match="protocol error"):
                await client.session.call(ask(), CALL_S)
            await eventually(lambda: len(pair.worker.closed) == 1)
            assert "protocol error" in client.losses[0]
            here, there = client.session.counts, pair.server.counts
            assert (here.protocol_errors, there.protocol_errors) == (
                (0, 1) if side == "client" else (1, 0)
            )

    run(scenario())


@pytest.mark.parametrize("name", ["Welcome", "Grant", "StepEvents"])
def test_a_worker_that_dies_at_any_message_is_worker_lost(name):
    async def scenario():
        async with process("serve", name) as (peer, address):
            client = Client()
            with pytest.raises(WorkerLost):
                session = await client.connect(address)
                await session.call(ask("events"), CALL_S)
                await session.call(ask("wait 30"), 30.0)
            assert await asyncio.to_thread(peer.wait, 10) == -9
            assert len(client.losses) == (0 if name == "Welcome" else 1)
            if client.losses:
                await client.session.close()

    run(scenario())


def test_without_rules_nothing_is_asked():
    class Loud(FaultInjector):
        def decide(self, name):
            raise AssertionError(name)

    async def scenario():
        async with served(Worker(), Loud()) as pair:
            client = await pair.client(faults=Loud())
            await client.session.call(ask("events"), CALL_S)
            await eventually(lambda: len(client.events) == len(EVENTS))

    run(scenario())
