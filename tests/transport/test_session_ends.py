"""However a session ends, both sides learn it, once, and soon."""

import asyncio
import errno
import os
import signal
import socket
import time

import pytest

from core.errors import (
    ConfigError,
    DeadlineExceeded,
    Incompatible,
    InternalError,
    Refused,
    Stage,
    WorkerLost,
)
from core.messages import WIRE_VERSION, Cancel, Hello, Renew
from tests.transport.session_peer import (
    CALL_S,
    EVENTS,
    GRANT,
    KEY,
    Client,
    Worker,
    ask,
    eventually,
    process,
    run,
    served,
)
from transport.session_server import SessionServer

FOUND_WITHIN_S = 20.0
"""Keep-alive takes about four seconds; the rest is for a busy machine."""


def test_a_killed_worker_fails_every_pending_call_at_once():
    async def scenario():
        async with process("serve") as (peer, address):
            client = Client()
            session = await client.connect(address)
            calls = [asyncio.create_task(session.call(ask("wait 30"), 30.0)) for _ in range(5)]
            assert await session.call(ask(), CALL_S) == GRANT
            os.kill(peer.pid, signal.SIGKILL)
            outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5.0)
            assert {(type(e), e.stage, e.worker) for e in outcomes} == {
                (WorkerLost, Stage.RESERVE, "worker-0")
            }
            with pytest.raises(WorkerLost):
                await session.call(ask(), CALL_S)
            with pytest.raises(WorkerLost):
                await session.notify(Renew(()))
            await session.close()
            assert len(client.losses) == 1

    run(scenario())


def test_stopped_peers_are_found_by_keep_alive_on_either_side():
    async def scenario():
        async with (
            served() as pair,
            process("serve") as (worker, address),
            process("client", pair.address) as (router, said),
        ):
            assert said == "connected"
            client = Client()
            session = await client.connect(address)
            os.kill(worker.pid, signal.SIGSTOP)
            os.kill(router.pid, signal.SIGSTOP)
            start = time.monotonic()
            with pytest.raises(WorkerLost):
                await session.call(ask(), 30.0)
            await eventually(lambda: len(pair.worker.closed) == 1, 30.0)
            assert time.monotonic() - start < FOUND_WITHIN_S
            assert len(client.losses) == 1
            await session.close()

    run(scenario())


def test_a_worker_whose_event_loop_is_stuck_is_not_taken_for_dead():
    """Its keep-alive goes on; the caller's deadline is what ends the waiting."""

    async def scenario():
        async with process("serve") as (_, address):
            client = Client()
            session = await client.connect(address)
            with pytest.raises(DeadlineExceeded):
                await session.call(ask("block 6"), 1.0)
            assert await session.call(ask(), 20.0) == GRANT
            assert client.losses == []
            await session.close()

    run(scenario())


def test_a_stopping_worker_sends_what_waits_and_says_that_it_stops():
    async def scenario():
        async with served() as pair:
            client = await pair.client()
            pair.worker.sessions[0].send(EVENTS[0])
            await pair.server.stop(5.0)
            assert pair.worker.closed == [pair.worker.sessions[0].owner]
            await eventually(lambda: client.losses != [])
            assert client.events == [EVENTS[0]]
            assert "the worker stops" in client.losses[0]
            await pair.server.stop(5.0)
            assert len(client.losses) == 1

    run(scenario())


def test_a_closing_client_sends_what_waits_and_is_not_told_of_its_own_end():
    async def scenario():
        async with served() as pair:
            client = await pair.client()
            pending = asyncio.create_task(client.session.call(ask("wait 30"), 30.0))
            await asyncio.sleep(0.05)
            await client.session.notify(Renew((KEY,)))
            await client.session.close()
            with pytest.raises(WorkerLost, match="closed by this side"):
                await pending
            await eventually(lambda: pair.worker.closed == [pair.worker.sessions[0].owner])
            assert pair.worker.notices == [Renew((KEY,))]
            await client.session.close()
            assert client.losses == []

    run(scenario())


def test_calls_that_still_run_are_stopped_before_on_close():
    order = []

    class Slow(Worker):
        async def on_call(self, session, call):
            try:
                await asyncio.sleep(30)
            finally:
                order.append("call")

        def on_close(self, session):
            order.append("close")

    async def scenario():
        async with served(Slow()) as pair:
            client = await pair.client()
            with pytest.raises(DeadlineExceeded):
                await client.session.call(ask(), 0.1)
            await client.session.close()
            await eventually(lambda: "close" in order)
            assert order == ["call", "close"]

    run(scenario())


def test_a_reconnected_client_is_a_new_owner():
    async def scenario():
        async with served() as pair:
            for _ in range(3):
                client = await pair.client()
                await client.session.close()
            owners = [s.owner for s in pair.worker.sessions]
            assert len(set(owners)) == 3
            await eventually(lambda: sorted(pair.worker.closed) == sorted(owners))

    run(scenario())


def test_another_wire_version_is_refused_by_name():
    async def scenario():
        async with served() as pair:
            client = Client()
            with pytest.raises(Incompatible, match="wire_version") as caught:
                await client.connect(pair.address, Hello(WIRE_VERSION + 1, "router", 0))
            assert (caught.value.field, caught.value.stage) == ("wire_version", Stage.START)
            assert pair.worker.sessions == []
            assert client.losses == []

    run(scenario())


@pytest.mark.parametrize(
    ("refusal", "error"),
    [(Refused("draining"), Refused), (ZeroDivisionError("a bug"), InternalError)],
    ids=["typed", "bug"],
)
def test_a_refused_client_gets_the_reason_and_no_session(refusal, error):
    async def scenario():
        async with served() as pair:
            pair.worker.refusal = refusal
            client = Client()
            with pytest.raises(error):
                await client.connect(pair.address)
            pair.worker.refusal = None
            await client.connect(pair.address)
            await client.session.close()
            await eventually(lambda: len(pair.worker.closed) == 1)
            assert client.losses == []

    run(scenario())


def test_nobody_listening_is_worker_lost_and_names_the_address():
    async def scenario():
        with socket.create_server(("127.0.0.1", 0)) as probe:
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(WorkerLost) as caught:
            await Client().connect(address)
        assert (caught.value.worker, caught.value.stage) == (address, Stage.START)

    run(scenario())


def test_a_listener_that_never_speaks_is_a_deadline():
    async def scenario():
        with socket.create_server(("127.0.0.1", 0)) as mute:
            address = f"127.0.0.1:{mute.getsockname()[1]}"
            with pytest.raises(DeadlineExceeded) as caught:
                await Client().connect(address, connect_s=0.3)
            assert (caught.value.worker, caught.value.stage) == (address, Stage.START)

    run(scenario())


def test_a_taken_port_is_a_configuration_error():
    async def scenario():
        async with served() as pair:
            port = int(pair.address.rpartition(":")[2])
            with pytest.raises(ConfigError) as caught:
                await SessionServer(Worker(), "127.0.0.1", port).start()
            assert caught.value.field == "port"

    run(scenario())


def test_the_server_listens_on_the_given_host_only():
    async def scenario():
        async with served() as pair:
            host, _, port = pair.address.rpartition(":")
            assert host == "127.0.0.1"
            with socket.socket() as elsewhere:
                assert elsewhere.connect_ex(("127.0.0.2", int(port))) == errno.ECONNREFUSED

    run(scenario())


def test_a_cancel_after_the_worker_is_gone_is_a_typed_error():
    async def scenario():
        async with served() as pair:
            client = await pair.client()
            await pair.server.stop(1.0)
            with pytest.raises(WorkerLost) as caught:
                await client.session.call(Cancel(KEY), CALL_S)
            assert caught.value.stage == Stage.DECODE

    run(scenario())
