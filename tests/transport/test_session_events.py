"""Events of a worker: order, bounded memory, and threads."""

import asyncio
import threading

import grpc

from core.messages import Role, StepEvents, TokenEvent, WorkerReport
from tests.transport.session_peer import (
    CALL_S,
    EVENTS,
    HELLO,
    KEY,
    WELCOME,
    Worker,
    ask,
    eventually,
    run,
    served,
)
from transport.codec import Envelope
from transport.wire import METHOD, SERVICE, SessionLimits, seal


def step(i: int) -> StepEvents:
    return StepEvents((TokenEvent(KEY, i, (i,)),))


def test_ten_thousand_events_of_another_thread_arrive_once_and_in_order():
    count = 10_000

    async def scenario():
        async with served(limits=SessionLimits(outbox=count)) as pair:
            client = await pair.client()
            session = pair.worker.sessions[0]
            engine = threading.Thread(target=lambda: [session.send(step(i)) for i in range(count)])
            engine.start()
            await eventually(lambda: len(client.events) >= count, 50)
            engine.join()
            assert client.events == [step(i) for i in range(count)]

    run(scenario())


def test_every_kind_of_event_is_delivered_with_the_answers_between():
    async def scenario():
        async with served() as pair:
            client = await pair.client()
            await client.session.call(ask("events"), CALL_S)
            await eventually(lambda: len(client.events) == len(EVENTS))
            assert set(client.events) == set(EVENTS)

    run(scenario())


def test_of_waiting_reports_only_the_newest_is_sent():
    async def scenario():
        async with served() as pair:
            client = await pair.client()
            session = pair.worker.sessions[0]
            for free in range(50):
                session.send(WorkerReport("worker-0", Role.DECODE, 7, free_blocks=free))
            session.send(step(0))
            await eventually(lambda: len(client.events) == 2)
            await client.session.call(ask(), CALL_S)
            assert [type(e).__name__ for e in client.events] == ["StepEvents", "WorkerReport"]
            assert client.events[1].free_blocks == 49

    run(scenario())


def test_no_event_is_delivered_before_connect_has_returned():
    class Eager(Worker):
        def welcome(self, hello, session):
            for i in range(3):
                session.send(step(i))
            return super().welcome(hello, session)

    async def scenario():
        async with served(Eager()) as pair:
            client = await pair.client()
            assert client.events == []
            await eventually(lambda: len(client.events) == 3)
            assert client.events == [step(i) for i in range(3)]

    run(scenario())


def test_a_client_that_does_not_read_is_closed_and_hurts_nobody_else(caplog):
    """The slow one is raw gRPC: `ClientSession` itself always reads."""

    async def scenario():
        async with served(limits=SessionLimits(outbox=200)) as pair:
            channel = grpc.aio.insecure_channel(pair.address)
            stream = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
            await stream.write(seal(Envelope(HELLO, id=1)))
            assert await stream.read() == seal(Envelope(WELCOME, reply_to=1))
            slow = pair.worker.sessions[0]
            client = await pair.client()
            big = StepEvents((TokenEvent(KEY, 0, tuple(range(2000))),))
            for _ in range(2000):
                if slow.owner in pair.worker.closed:
                    break
                slow.send(big)
                await asyncio.sleep(0)
            await eventually(lambda: slow.owner in pair.worker.closed)
            assert pair.server.counts.slow_peers == 1
            assert await client.session.call(ask(), CALL_S)
            assert client.losses == []
            await channel.close()

    run(scenario())
    assert "does not read" in caplog.text


def test_events_after_the_end_are_dropped():
    async def scenario():
        async with served() as pair:
            client = await pair.client()
            session = pair.worker.sessions[0]
            await client.session.close()
            await eventually(lambda: pair.worker.closed == [session.owner])
            for i in range(10):
                session.send(step(i))
            assert client.events == []

    run(scenario())


def test_sending_from_a_thread_after_the_loop_is_gone_is_harmless():
    worker = Worker()

    async def scenario():
        async with served(worker) as pair:
            await pair.client()

    run(scenario())
    worker.sessions[0].send(step(0))
    assert worker.closed == [worker.sessions[0].owner]
