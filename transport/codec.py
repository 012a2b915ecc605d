"""Messages of `core.messages` <-> protobuf, by field name, from the dataclasses' own type hints.

How each class converts is worked out once, at import.  Neighbours: `proto/worker.proto` has the
same fields (a golden test says so); `wire.py` puts the bytes into checked frames.
"""

import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError, EncodeError

from core.errors import InternalError
from core.messages import Message
from transport.proto import worker_pb2


class ProtocolError(InternalError):
    """The peer sent something that cannot be understood; the session it came by ends."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """One message on a session.

    id: names a call, ascending per session; 0 on anything else.
    reply_to: id of the call that this message answers; 0 on anything else.
    """

    message: Message
    id: int = 0
    reply_to: int = 0


class _Codec(NamedTuple):
    """pack: our value -> what a protobuf constructor takes; unpack: protobuf value -> ours.

    nested: a message field, whose absence protobuf can tell.
    """

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]
    nested: bool = False


class _Field(NamedTuple):
    name: str
    codec: _Codec
    optional: bool


def _same(value: Any) -> Any:
    return value


_PLAIN = _Codec(_same, _same)


@cache
def _codec(hint: Any) -> _Codec:
    """Raises TypeError on a hint that does not travel: a mistake in core.messages."""
    hint = getattr(hint, "__supertype__", hint)
    if typing.get_origin(hint) is tuple:
        return _tuple_codec(_codec(typing.get_args(hint)[0]))
    if hint in (bool, int, float, str, bytes):
        return _PLAIN
    if issubclass(hint, StrEnum):
        return _enum_codec(hint)
    if is_dataclass(hint) or issubclass(hint, tuple):
        return _record_codec(hint)
    raise TypeError(f"{hint} has no form on the wire")


def _tuple_codec(item: _Codec) -> _Codec:
    if item is _PLAIN:
        return _Codec(_same, tuple)
    return _Codec(
        lambda values: [item.pack(v) for v in values],
        lambda values: tuple(item.unpack(v) for v in values),
    )


def _enum_codec(kind: type[StrEnum]) -> _Codec:
    members = {str(member): member for member in kind}

    def unpack(value: str) -> StrEnum:
        try:
            return members[value]
        except KeyError:
            known = ", ".join(members)
            raise ProtocolError(f"{value!r} is no {kind.__name__}; known: {known}") from None

    return _Codec(lambda value: kind(value).value, unpack)


def _record_codec(kind: Any) -> _Codec:
    """Of a dataclass or NamedTuple."""
    plan = tuple(_field(name, hint) for name, hint in typing.get_type_hints(kind).items())

    def pack(value: Any) -> dict[str, Any]:
        packed: dict[str, Any] = {}
        for name, codec, optional in plan:
            part = getattr(value, name)
            if part is not None:
                packed[name] = codec.pack(part)
            elif not optional:
                raise ValueError(f"{kind.__name__}.{name} is None")
        return packed

    def unpack(proto: Any) -> Any:
        values: dict[str, Any] = {}
        for name, codec, optional in plan:
            if not (optional or codec.nested) or proto.HasField(name):
                values[name] = codec.unpack(getattr(proto, name))
            elif optional:
                values[name] = None
            else:
                raise ProtocolError(f"{kind.__name__}.{name} is missing")
        return kind(**values)

    return _Codec(pack, unpack, nested=True)


def _field(name: str, hint: Any) -> _Field:
    if typing.get_origin(hint) is types.UnionType:
        return _Field(name, _codec(typing.get_args(hint)[0]), optional=True)
    return _Field(name, _codec(hint), optional=False)


def body_name(kind: type) -> str:
    """Field of `Envelope.body` that carries this class: its name in snake case."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


MESSAGE_CLASSES: tuple[type, ...] = typing.get_args(Message)
"""Every class that travels on its own."""

_BY_CLASS = {kind: (body_name(kind), _codec(kind).pack) for kind in MESSAGE_CLASSES}
_BY_BODY = {body_name(kind): _codec(kind).unpack for kind in MESSAGE_CLASSES}


def encode(envelope: Envelope) -> bytes:
    """The envelope as protobuf.  Raises InternalError naming class, cause and value."""
    kind = type(envelope.message)
    try:
        body, pack = _BY_CLASS[kind]
        proto = worker_pb2.Envelope(
            id=envelope.id,
            reply_to=envelope.reply_to,
            **{body: pack(envelope.message)},
        )
        return proto.SerializeToString()
    except (KeyError, TypeError, ValueError, AttributeError, EncodeError) as error:
        raise InternalError(
            f"{kind.__name__} cannot be sent, its values must fit "
            f"transport/proto/worker.proto ({type(error).__name__}: {error})"
        ) from error


def decode(data: bytes) -> Envelope:
    """The inverse.  Raises ProtocolError."""
    try:
        proto = worker_pb2.Envelope.FromString(data)
    except DecodeError as error:
        raise ProtocolError(f"not an envelope of {len(data)} bytes: {error}") from error
    body = proto.WhichOneof("body")
    if body is None:
        raise ProtocolError("an envelope without a known body; is the peer of another version?")
    return Envelope(_BY_BODY[body](getattr(proto, body)), proto.id, proto.reply_to)
