"""What both ends of a session agree on: checked frames, the method, channel settings, limits."""

import zlib
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from core.errors import BodyTooLarge
from transport.codec import Envelope, ProtocolError, decode, encode
from transport.proto import worker_pb2

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
METHOD = "Session"
MAX_FRAME_BYTES = 16 << 20
"""A prompt of a million tokens takes 3 to 5 MB."""

_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
"""Both ends ping, so that a peer that is stopped or cut off is found in about four seconds.
Without ping_timeout_ms, 60 s by default, keepalive_timeout_ms has no effect (measured, grpcio
1.85).  gRPC's own threads answer pings: a stuck event loop is not mistaken for a dead process."""

_SIZES = (
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
)

CHANNEL_OPTIONS = (
    *_KEEPALIVE,
    *_SIZES,
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
)
"""One connection per session, never shared: its loss is the session's loss."""

SERVER_OPTIONS = (
    *_KEEPALIVE,
    *_SIZES,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """hello_s: until a new stream has said Hello.  outbox: messages that may wait for a peer
    that does not read.  remembered: answered calls whose reply can be sent again.
    running: calls of one session in progress.  close_s: to send what is left at the end.
    """

    hello_s: float = 5.0
    outbox: int = 8192
    remembered: int = 1024
    running: int = 1024
    close_s: float = 0.5


def seal(envelope: Envelope) -> bytes:
    """A serialized Frame.  Raises InternalError (values that do not fit), BodyTooLarge."""
    data = encode(envelope)
    frame = worker_pb2.Frame(checksum=zlib.crc32(data), envelope=data).SerializeToString()
    if len(frame) > MAX_FRAME_BYTES:
        raise BodyTooLarge(
            f"{type(envelope.message).__name__} of {len(frame)} bytes; "
            f"a message between workers may have {MAX_FRAME_BYTES}, send a shorter prompt"
        )
    return frame


def unseal(data: bytes) -> Envelope:
    """The inverse of `seal`.  Raises ProtocolError on anything but what `seal` made."""
    try:
        frame = worker_pb2.Frame.FromString(data)
    except DecodeError as error:
        raise ProtocolError(f"not a frame of {len(data)} bytes: {error}") from error
    if zlib.crc32(frame.envelope) != frame.checksum:
        raise ProtocolError(f"the checksum of a frame of {len(data)} bytes does not match")
    return decode(frame.envelope)
