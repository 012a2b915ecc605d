"""Peers that do not speak the protocol lose their own stream and nothing else."""

import asyncio
import os
import socket
import zlib
from contextlib import asynccontextmanager

import grpc
import pytest

from core.messages import Accepted, Cancel, StepEvents
from tests.transport.session_peer import CALL_S, GRANT, HELLO, KEY, WELCOME, ask, run, served
from transport.codec import Envelope
from transport.proto import worker_pb2
from transport.wire import MAX_FRAME_BYTES, METHOD, SERVICE, SessionLimits, seal


@asynccontextmanager
async def raw(address):
    """A stream of bytes to the session method, without our client."""
    options = (("grpc.max_send_message_length", -1),)
    channel = grpc.aio.insecure_channel(address, options=options)
    try:
        yield channel.stream_stream(f"/{SERVICE}/{METHOD}")()
    finally:
        await channel.close()


async def ended(stream) -> str:
    """Why the server ended the stream."""
    async with asyncio.timeout(10):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await stream.read() is not grpc.aio.EOF:
                pass
    return str(caught.value.details())


def framed(envelope: bytes) -> bytes:
    frame = worker_pb2.Frame(checksum=zlib.crc32(envelope), envelope=envelope)
    return frame.SerializeToString()


GARBAGE = {
    "not protobuf": (b"\xff" * 40, "not a frame"),
    "empty": (b"", "without a known body"),
    "wrong checksum": (
        worker_pb2.Frame(checksum=1, envelope=b"x").SerializeToString(),
        "checksum",
    ),
    "not an envelope": (framed(b"\xff" * 9), "not an envelope"),
    "unknown body": (framed(b"\xf2\x3f\x00"), "without a known body"),
    "hole": (
        framed(worker_pb2.Envelope(id=2, cancel={}).SerializeToString()),
        "Cancel.key is missing",
    ),
}
LATER_GARBAGE = {
    "an event": (seal(Envelope(StepEvents(()))), "StepEvents comes from workers only"),
    "a second hello": (seal(Envelope(HELLO, id=2)), "a second Hello"),
    "no id": (seal(Envelope(Cancel(KEY))), "a call without an id"),
}
FIRST_GARBAGE = {
    "an event": (seal(Envelope(StepEvents(()))), "the first message is StepEvents"),
    "a call": (seal(Envelope(Cancel(KEY), id=1)), "the first message is Cancel"),
    "no id": (seal(Envelope(HELLO)), "a call without an id"),
}


async def check(data: bytes, why: str, greeted: bool) -> None:
    async with served() as pair:
        good = await pair.client()
        async with raw(pair.address) as stream:
            if greeted:
                await stream.write(seal(Envelope(HELLO, id=1)))
                assert await stream.read() == seal(Envelope(WELCOME, reply_to=1))
            await stream.write(data)
            assert why in await ended(stream)
        assert pair.server.counts.protocol_errors == 1
        assert len(pair.worker.closed) == (1 if greeted else 0)
        assert pair.worker.calls == []
        assert await good.session.call(ask(), CALL_S) == GRANT
        assert good.losses == []


def cases(*groups):
    merged = {name: case for group in groups for name, case in group.items()}
    return pytest.mark.parametrize(("data", "why"), merged.values(), ids=merged.keys())


@cases(GARBAGE, FIRST_GARBAGE)
def test_garbage_instead_of_hello_ends_its_own_stream_and_no_other(data, why):
    run(check(data, why, greeted=False))


@cases(GARBAGE, LATER_GARBAGE)
def test_garbage_on_a_session_ends_that_session_and_no_other(data, why):
    run(check(data, why, greeted=True))


def test_a_stream_that_says_nothing_is_closed():
    async def scenario():
        async with served(limits=SessionLimits(hello_s=0.2)) as pair, raw(pair.address) as stream:
            assert "no Hello within 0.2 s" in await ended(stream)
            assert pair.worker.sessions == []

    run(scenario())


def test_replies_that_nobody_asked_for_are_counted():
    async def scenario():
        async with served() as pair, raw(pair.address) as stream:
            await stream.write(seal(Envelope(HELLO, id=1)))
            await stream.write(seal(Envelope(Accepted(KEY), reply_to=77)))
            await stream.write(seal(Envelope(Cancel(KEY), id=2)))
            assert await stream.read() == seal(Envelope(WELCOME, reply_to=1))
            assert await stream.read() == seal(Envelope(Accepted(KEY), reply_to=2))
            assert pair.server.counts.unknown_replies == 1

    run(scenario())


def test_an_oversize_message_ends_its_own_stream_and_no_other():
    async def scenario():
        async with served() as pair:
            good = await pair.client()
            async with raw(pair.address) as stream:
                await stream.write(seal(Envelope(HELLO, id=1)))
                assert await stream.read() == seal(Envelope(WELCOME, reply_to=1))
                await stream.write(bytes(MAX_FRAME_BYTES + 1))
                await ended(stream)
            async with asyncio.timeout(10):
                while len(pair.worker.closed) < 1:
                    await asyncio.sleep(0.01)
            assert await good.session.call(ask(), CALL_S) == GRANT

    run(scenario())


def test_bytes_that_are_not_http2_hurt_nobody():
    async def scenario():
        async with served() as pair:
            good = await pair.client()
            host, _, port = pair.address.rpartition(":")
            for data in (os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM"):
                with socket.create_connection((host, int(port)), 5.0) as peer:
                    peer.sendall(data)
            assert await good.session.call(ask(), CALL_S) == GRANT
            assert await (await pair.client()).session.call(ask(), CALL_S) == GRANT
            assert good.losses == []

    run(scenario())
