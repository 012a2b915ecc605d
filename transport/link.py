"""The sending end of the data plane: one connection to one peer.

A push is cut into frames; each waits for the destination's answer.  Whatever leaves the stream
in doubt (deadline, damage, disconnect) closes the link and waits until the peer closed too:
after the report nobody reads the source blocks for it.  Reconnecting is the caller's.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from core.errors import Stage, TransferFailed
from core.ids import Epoch, LeaseId
from core.kvlayout import KVLayout
from core.messages import DataEndpoint
from core.ports import MoveReport, MoveState, Ticket
from core.spec import TimeoutSpec, TransportSpec
from transport import data_hello as hellos
from transport import frame as frames
from transport import shm, tcp
from transport.arena import MemfdArena
from transport.data_socket import Bytes, DataSocket
from transport.faulty import FaultInjector
from transport.faulty_link import FaultySend
from transport.frame import Answer, Frame, Kind

log = logging.getLogger(__name__)

FRAME_BYTES = 32 << 20  # cap per frame: in flight per link, and lost at most by a failure
_FENCE_S = 2.0  # field/transport.md 4.7


@dataclass(frozen=True, slots=True)
class Source:
    """What all outgoing links of a process share.  The arena outlives the links."""

    arena: MemfdArena
    layout: KVLayout
    transport: TransportSpec
    timeouts: TimeoutSpec
    faults: FaultInjector | None = None


def open_link(endpoint: DataEndpoint, link_key: bytes, source: Source, peer: str) -> "DataLink":
    """Connect, prove the key, and move a probe.  Blocks for `timeouts.connect_s` at most.

    Raises TransferFailed naming the peer and the backend: try the next backend of `choose`.
    """
    limit_s = source.timeouts.connect_s
    deadline = time.monotonic() + limit_s
    try:
        with contextlib.ExitStack() as stack:
            wire = DataSocket(_dial(endpoint, source.transport.congestion, limit_s))
            stack.callback(wire.close)
            _greet(wire, endpoint.mover, link_key, source, deadline)
            link = DataLink(endpoint.mover, wire, source, peer)
            link.probe(deadline)
            stack.pop_all()
            return link
    except (OSError, TransferFailed) as error:
        why = error.message if isinstance(error, TransferFailed) else str(error)
        raise TransferFailed(
            f"{endpoint.mover} link to {endpoint.address}: {why}; try another mover",
            stage=Stage.TRANSFER,
            worker=peer,
        ) from error


class DataLink:
    """Owns its connection.  One push at a time; `close` from any thread."""

    def __init__(self, name: str, wire: DataSocket, source: Source, peer: str) -> None:
        self.name = name
        self._wire = wire
        self._source = source
        self._peer = peer
        self._inline = name == tcp.MOVER
        self._per_frame = max(1, min(frames.MAX_BLOCKS, FRAME_BYTES // source.layout.block_bytes))
        self._send = FaultySend(wire, source.faults) if source.faults else self._plain_send
        self._sequence = 0
        self._turn = threading.Lock()
        self._broken = ""
        self._fenced = False

    def push(self, ticket: Ticket, deadline_s: float) -> MoveReport:
        """Blocks until the terminal report: the deadline, plus 2 s of fence when it passes."""
        deadline = time.monotonic() + deadline_s
        if not self._turn.acquire(timeout=max(0.0, deadline_s)):
            return self._failed("another push holds the link until the deadline", 0)
        moved = 0
        try:
            for frame in self._cut(ticket):
                if self._broken:
                    return self._failed(self._broken, moved)
                answer = self._exchange(frame, deadline)
                if answer.state is not MoveState.DONE:
                    return MoveReport(answer.state, self.name, moved, answer.reason)
                moved += frame.count * self._source.layout.block_bytes
        except TransferFailed as error:  # this ticket cannot be sent; the stream is in order
            return self._failed(error.message, moved)
        except OSError as error:
            timeout = isinstance(error, TimeoutError)
            why = f"no answer within {deadline_s:.1f} s" if timeout else str(error)
            self._broken = self._broken or f"link closed: {why}"
            self._fence()
            return self._failed(self._broken, moved)
        finally:
            self._turn.release()
        return MoveReport(MoveState.DONE, self.name, moved)

    def probe(self, deadline: float) -> None:
        """Move a block to nowhere.  Raises TransferFailed or OSError when that does not work."""
        arena = self._source.arena
        frame = self._number(
            Frame(
                Kind.PROBE,
                0,
                LeaseId(""),
                Epoch(0),
                self._source.layout.digest,
                0,
                (0,),
                (arena.beacon,),
            )
        )
        payload: list[Bytes] = []
        if self._inline:  # a copy: the engine may write to the block meanwhile
            block = bytes(arena.block(0))
            payload = [block]
            frame = replace(
                frame, sums=(frames.checksum(memoryview(block)),), inline_bytes=len(block)
            )
        self._plain_send(frame, payload, deadline)
        answer = self._await(frame.sequence, deadline)
        if answer.state is not MoveState.DONE:
            raise TransferFailed(f"probe: {answer.reason}", stage=Stage.TRANSFER)

    def close(self) -> None:
        """Returns when no byte can land any more, after 6 s at most; wakes a running push."""
        self._broken = self._broken or "link closed here"
        self._wire.finish()
        held = self._turn.acquire(timeout=_FENCE_S)
        if not held:
            self._wire.stop()
            held = self._turn.acquire(timeout=_FENCE_S)
        try:
            self._fence()
        finally:
            if held:
                self._turn.release()

    def _exchange(self, frame: Frame, deadline: float) -> Answer:
        """Send one frame and await its answer, with the generations compared before and after."""
        views = [self._source.arena.block(i) for i in frame.block_ids]
        self._compare(frame)
        if self._source.transport.checksum:
            frame = replace(frame, sums=tuple(frames.checksum(v) for v in views))
        if self._inline:
            frame = replace(frame, inline_bytes=frame.count * self._source.layout.block_bytes)
        frame = self._number(frame)
        self._send(frame, views if self._inline else (), deadline)
        answer = self._await(frame.sequence, deadline)
        self._compare(frame)
        return answer

    def _await(self, sequence: int, deadline: float) -> Answer:
        """Answers to earlier frames (sent twice by a fault) are passed over.  Raises OSError."""
        while True:
            head = self._wire.receive(frames.ANSWER_BYTES, deadline)
            try:
                reason = self._wire.receive(frames.reason_bytes(head), deadline)
                answer = frames.decode_answer(head, reason)
            except TransferFailed as error:
                raise ConnectionError(error.message) from error
            if answer.sequence == 0 and answer.state is not MoveState.DONE:
                raise ConnectionError(answer.reason)
            if answer.sequence == sequence:
                return answer

    def _cut(self, ticket: Ticket) -> Iterator[Frame]:
        """Raises TransferFailed on a ticket that does not add up."""
        if len(ticket.block_ids) != len(ticket.generations):
            raise TransferFailed(
                f"{len(ticket.block_ids)} blocks with {len(ticket.generations)} generations; "
                "this is a bug of the sender",
                stage=Stage.TRANSFER,
            )
        for at in range(0, len(ticket.block_ids), self._per_frame):
            part = slice(at, at + self._per_frame)
            yield Frame(
                Kind.BLOCKS,
                0,
                ticket.lease_id,
                ticket.epoch,
                self._source.layout.digest,
                ticket.first_index + at,
                ticket.block_ids[part],
                ticket.generations[part],
            )

    def _number(self, frame: Frame) -> Frame:
        self._sequence += 1
        return replace(frame, sequence=self._sequence)

    def _plain_send(self, frame: Frame, payload: Sequence[Bytes], deadline: float) -> None:
        self._wire.send([frames.encode(frame), *payload], deadline)

    def _compare(self, frame: Frame) -> None:
        """Lent blocks do not change hands; if one did, the bytes are not what was promised."""
        now = self._source.arena.generations
        for block_id, generation in zip(frame.block_ids, frame.generations, strict=True):
            if now[block_id] != generation:
                raise TransferFailed(
                    f"stale: source block {block_id} changed hands; recompute",
                    stage=Stage.TRANSFER,
                )

    def _fence(self) -> None:
        if self._fenced:
            return
        self._fenced = True
        self._wire.finish()
        if self._wire.wait_end(time.monotonic() + _FENCE_S):
            self._wire.close()
        else:
            log.warning("%s did not close its end of a %s link in time", self._peer, self.name)
            self._wire.abort()

    def _failed(self, why: str, moved: int) -> MoveReport:
        return MoveReport(MoveState.FAILED, self.name, moved, f"{self._peer}: {why}")


def _dial(endpoint: DataEndpoint, congestion: str, timeout_s: float) -> socket.socket:
    if endpoint.mover == shm.MOVER:
        return shm.dial(endpoint.address, timeout_s)
    if endpoint.mover == tcp.MOVER:
        return tcp.dial(endpoint.address, congestion, timeout_s)
    raise OSError("this version has no such backend")


def _greet(wire: DataSocket, mover: str, link_key: bytes, source: Source, deadline: float) -> None:
    """Raises TransferFailed with the destination's reason, OSError when it just closed."""
    challenge = wire.receive(hellos.CHALLENGE_BYTES, deadline)
    hello = hellos.encode_hello(source.arena.geometry, link_key, challenge, mover)
    if mover == shm.MOVER:
        shm.greet(wire.sock, hello, source.arena.fd)
    else:
        wire.send([hello], deadline)
    head = wire.receive(frames.ANSWER_BYTES, deadline)
    answer = frames.decode_answer(head, wire.receive(frames.reason_bytes(head), deadline))
    if answer.state is not MoveState.DONE:
        raise TransferFailed(answer.reason, stage=Stage.TRANSFER)
