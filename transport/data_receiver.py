"""Lands the frames of one incoming data connection in this process's own pool.

    begin ──▶ blocks are FILLING, ours to write ──▶ end(ok)        exactly one end per begin
Runs on its own thread and is the only one to write for this connection.  Every frame gets one
answer, sent after `end`; a connection that lost its place in the stream is closed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from core.errors import InternalError, LeaseGone, Stage, TransferFailed, TriremeError
from core.ids import BlockId
from core.kvlayout import KVLayout
from core.ports import Arena, Landing, MoveState
from transport import frame as frames
from transport.data_socket import DataSocket
from transport.frame import Answer, Frame, Kind

_IDLE_TICK_S = 60.0  # an idle link is healthy; `DataSocket.stop` ends the wait at once


@dataclass(frozen=True, slots=True)
class Destination:
    """Where bytes land.  frame_s: from the first byte of a frame to its last."""

    landing: Landing
    arena: Arena
    layout: KVLayout
    frame_s: float

    def views(self, block_ids: Sequence[BlockId], count: int) -> list[memoryview]:
        """Writable bytes of blocks.  Raises InternalError when the landing named wrong ones."""
        total, size = len(self.arena.generations), self.layout.block_bytes
        if len(block_ids) != count or not all(0 <= i < total for i in block_ids):
            raise InternalError(
                f"landing gave blocks {tuple(block_ids)} for {count} places in a pool of {total}; "
                "this is a bug of the engine",
                stage=Stage.TRANSFER,
            )
        return [self.arena.blocks[i * size : (i + 1) * size] for i in block_ids]


class Inlet(Protocol):
    """How one backend gets at the bytes of a frame."""

    def refusal(self, frame: Frame) -> str:
        """Why these bytes cannot be had; empty: they can."""
        ...

    def land(self, frame: Frame, views: Sequence[memoryview], deadline: float) -> None:
        """Raises TransferFailed (bytes unusable, connection fine), OSError (connection over)."""
        ...

    def close(self) -> None: ...


class Receiver:
    """`run` returns when the connection is over."""

    def __init__(
        self,
        wire: DataSocket,
        inlet: Inlet,
        destination: Destination,
        count: Callable[[str, int], None],
    ) -> None:
        self._wire = wire
        self._inlet = inlet
        self._to = destination
        self._count = count

    def run(self) -> None:
        """Answer frames until the stream ends.  Raises OSError when it ended, for any reason."""
        while True:
            if self._wire.readable(_IDLE_TICK_S):
                self._next()

    def _next(self) -> None:
        deadline = time.monotonic() + self._to.frame_s
        prefix = self._wire.receive(frames.PREFIX_BYTES, deadline)
        try:
            body = self._wire.receive(frames.body_bytes(prefix), deadline)
            frame = frames.decode(prefix, body)
        except TransferFailed as error:
            self._answer(Answer(0, MoveState.FAILED, error.message), deadline)
            raise ConnectionError(error.message) from error
        self._answer(self._handle(frame, deadline), deadline)

    def _handle(self, frame: Frame, deadline: float) -> Answer:
        refusal = self._refusal(frame)
        if refusal:
            return self._drop(frame, MoveState.FAILED, refusal, deadline)
        if frame.kind is Kind.PROBE:
            scratch = [memoryview(bytearray(self._to.layout.block_bytes))]
            return self._fill(frame, scratch, deadline)
        try:
            block_ids = self._to.landing.begin(
                frame.lease_id, frame.epoch, frame.first_index, frame.count
            )
        except LeaseGone as error:
            return self._drop(frame, MoveState.GONE, error.message, deadline)
        except TriremeError as error:
            return self._drop(frame, MoveState.FAILED, error.message, deadline)
        ok = False
        try:
            answer = self._fill(frame, self._to.views(block_ids, frame.count), deadline)
            ok = answer.state is MoveState.DONE
        finally:
            self._to.landing.end(frame.lease_id, frame.first_index, frame.count, ok)
        return answer

    def _fill(self, frame: Frame, views: list[memoryview], deadline: float) -> Answer:
        try:
            self._inlet.land(frame, views, deadline)
        except TransferFailed as error:
            return Answer(frame.sequence, MoveState.FAILED, error.message)
        for place, (view, expected) in enumerate(zip(views, frame.sums, strict=False)):
            if frames.checksum(view) != expected:
                reason = f"corrupt: checksum of place {frame.first_index + place}; send again"
                return Answer(frame.sequence, MoveState.FAILED, reason)
        if frame.kind is Kind.BLOCKS:
            self._count("data_blocks_landed", frame.count)
        return Answer(frame.sequence, MoveState.DONE)

    def _refusal(self, frame: Frame) -> str:
        if frame.layout != self._to.layout.digest:
            return "layout differs; start both workers with the same model and block size"
        if frame.kind is Kind.PROBE and frame.count != 1:
            return "a probe is one block"
        return self._inlet.refusal(frame)

    def _drop(self, frame: Frame, state: MoveState, reason: str, deadline: float) -> Answer:
        """Take the payload off the wire, so that the next frame is found."""
        self._wire.discard(frame.inline_bytes, deadline)
        return Answer(frame.sequence, state, reason)

    def _answer(self, answer: Answer, deadline: float) -> None:
        if answer.state is not MoveState.DONE:
            self._count(f"data_frames_{answer.state}", 1)
        self._wire.send([frames.encode_answer(answer)], deadline)
