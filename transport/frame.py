"""Frames of the data plane as bytes.  No I/O.

    prefix 16 B │ body: fixed 48 B, lease id, block ids u32, generations u64, sums u64, xxh3_64 │ …
and then `inline_bytes` of payload (tcp: the blocks; shm: none, the receiver reads the arena).
An answer is 20 B and a reason.  All numbers are little-endian; every byte is under a checksum.
"""

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import xxhash

from core.errors import Stage, TransferFailed
from core.ids import Epoch, LeaseId
from core.ports import MoveState

MAX_BLOCKS = 1024  # IOV_MAX: one frame is one sendmsg
MAX_LEASE_BYTES = 64
MAX_REASON_BYTES = 512
VERSION = 1

_MAGIC = b"TrKV"
_PREFIX = struct.Struct("<4sBBHII")  # magic, version, kind, lease bytes, body bytes, crc32 of these
_FIXED = struct.Struct("<QQQQIIII")  # sequence, epoch, layout, inline, first, count, sums, zero
_SUM = struct.Struct("<Q")
_ANSWER = struct.Struct("<4sBBHQI")  # magic, version, state, reason bytes, sequence, crc32
PREFIX_BYTES = _PREFIX.size
ANSWER_BYTES = _ANSWER.size
_MAX_BODY = _FIXED.size + MAX_LEASE_BYTES + MAX_BLOCKS * 20 + _SUM.size
_STATES = (MoveState.DONE, MoveState.GONE, MoveState.FAILED)


class Kind(IntEnum):
    BLOCKS = 1
    PROBE = 2
    """Lands nowhere: shows at connect that bytes arrive as they are.  generations = (beacon,)."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Blocks for the places first_index … of a lease.  `sums`: xxh3_64 per block, or none.

    block_ids and generations are the source's; sequence counts a connection's frames from 1.
    """

    kind: Kind
    sequence: int
    lease_id: LeaseId
    epoch: Epoch
    layout: int
    first_index: int
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    sums: tuple[int, ...] = ()
    inline_bytes: int = 0

    @property
    def count(self) -> int:
        return len(self.block_ids)


@dataclass(frozen=True, slots=True)
class Answer:
    """The receiver's terminal word on frame `sequence`; 0 is the connection itself."""

    sequence: int
    state: MoveState
    reason: str = ""


def checksum(block: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(block)


def encode(frame: Frame) -> bytes:
    """Raises TransferFailed when a value does not fit its field."""
    lease, n = frame.lease_id.encode(), frame.count
    if not 0 < n <= MAX_BLOCKS or len(frame.generations) != n or len(frame.sums) not in (0, n):
        raise _bad(f"{n} blocks, {len(frame.generations)} generations, {len(frame.sums)} sums")
    if len(lease) > MAX_LEASE_BYTES:
        raise _bad(f"a lease id of {len(lease)} bytes")
    try:
        body = b"".join(
            (
                _FIXED.pack(
                    frame.sequence,
                    frame.epoch,
                    frame.layout,
                    frame.inline_bytes,
                    frame.first_index,
                    n,
                    len(frame.sums),
                    0,
                ),
                lease,
                struct.pack(f"<{n}I", *frame.block_ids),
                struct.pack(f"<{n}Q", *frame.generations),
                struct.pack(f"<{len(frame.sums)}Q", *frame.sums),
            )
        )
    except struct.error as error:
        raise _bad(str(error)) from error
    start = _PREFIX.pack(_MAGIC, VERSION, frame.kind, len(lease), len(body) + _SUM.size, 0)
    prefix = start[:-4] + zlib.crc32(start[:-4]).to_bytes(4, "little")
    return prefix + body + _SUM.pack(xxhash.xxh3_64_intdigest(prefix + body))


def body_bytes(prefix: bytes) -> int:
    """How many bytes of body follow.  Raises TransferFailed: the stream is damaged, close it."""
    magic, version, _, lease_bytes, size, crc = _unpack(_PREFIX, prefix, "prefix")
    if magic != _MAGIC or crc != zlib.crc32(prefix[:-4]):
        raise _bad("no frame starts here")
    if version != VERSION:
        raise _bad(f"frame version {version}, this side speaks {VERSION}")
    if lease_bytes > MAX_LEASE_BYTES or not _FIXED.size < size <= _MAX_BODY:
        raise _bad(f"a header of {size} bytes, lease id {lease_bytes}")
    return int(size)


def decode(prefix: bytes, body: bytes) -> Frame:
    """The frame.  Raises TransferFailed: the stream is damaged, close it."""
    if len(body) != body_bytes(prefix):
        raise _bad(f"a header of {len(body)} bytes")
    if _SUM.unpack(body[-_SUM.size :])[0] != xxhash.xxh3_64_intdigest(prefix + body[: -_SUM.size]):
        raise _bad("header checksum")
    _, _, kind, lease_bytes, _, _ = _PREFIX.unpack(prefix)
    sequence, epoch, layout, inline, first, n, sums, _ = _FIXED.unpack_from(body)
    rest = len(body) - _FIXED.size - _SUM.size
    if not 0 < n <= MAX_BLOCKS or sums not in (0, n) or rest != lease_bytes + 12 * n + 8 * sums:
        raise _bad(f"{n} blocks and {sums} sums in {rest} bytes")
    at = _FIXED.size + lease_bytes
    try:
        return Frame(
            Kind(kind),
            sequence,
            LeaseId(body[_FIXED.size : at].decode()),
            Epoch(epoch),
            layout,
            first,
            struct.unpack_from(f"<{n}I", body, at),
            struct.unpack_from(f"<{n}Q", body, at + 4 * n),
            struct.unpack_from(f"<{sums}Q", body, at + 12 * n),
            inline,
        )
    except ValueError as error:  # an unknown kind, or a lease id that is not UTF-8
        raise _bad(str(error)) from error


def encode_answer(answer: Answer) -> bytes:
    """Reasons longer than MAX_REASON_BYTES are cut."""
    reason = answer.reason.encode()[:MAX_REASON_BYTES]
    state = _STATES.index(answer.state)
    start = _ANSWER.pack(_MAGIC, VERSION, state, len(reason), answer.sequence, 0)[:-4]
    return start + zlib.crc32(start + reason).to_bytes(4, "little") + reason


def reason_bytes(head: bytes) -> int:
    """How many bytes of reason follow.  Raises TransferFailed: the stream is damaged."""
    magic, version, state, size, _, _ = _unpack(_ANSWER, head, "answer")
    if (magic, version) != (_MAGIC, VERSION) or state >= len(_STATES) or size > MAX_REASON_BYTES:
        raise _bad("no answer starts here")
    return int(size)


def decode_answer(head: bytes, reason: bytes) -> Answer:
    """The answer.  Raises TransferFailed: the stream is damaged, close it."""
    size = reason_bytes(head)
    _, _, state, _, sequence, crc = _ANSWER.unpack(head)
    if len(reason) != size or crc != zlib.crc32(head[:-4] + reason):
        raise _bad("answer checksum")
    return Answer(sequence, _STATES[state], reason.decode(errors="replace"))


def _unpack(form: struct.Struct, data: bytes, what: str) -> tuple[Any, ...]:
    if len(data) != form.size:
        raise _bad(f"a {what} of {len(data)} bytes")
    return form.unpack(data)


def _bad(what: str) -> TransferFailed:
    return TransferFailed(f"bad frame: {what}; open a new link", stage=Stage.TRANSFER)
