"""Blocks between processes of one host: the destination maps the source's arena and copies.

A unix socket carries headers and answers; the source's arena comes over it once, as a file
descriptor.  Blocks that changed hands before or during the copy are known by their generation.
"""

import array
import os
import secrets
import socket
import struct
from collections.abc import Sequence

import numpy as np

from core.errors import Stage, TransferFailed
from core.messages import DataEndpoint
from transport.arena import Geometry, PeerArena, map_peer
from transport.data_hello import HELLO_BYTES
from transport.data_socket import DataSocket
from transport.frame import Frame, Kind

MOVER = "shm"
_BACKLOG = 128
_STEP_BYTES = 1 << 20  # between two steps a stop or a deadline is seen
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


def dial(address: str, timeout_s: float) -> socket.socket:
    """Connect to an abstract socket, written "@name".  Raises OSError."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout_s)
        sock.connect(address.replace("@", "\0", 1))
    except OSError:
        sock.close()
        raise
    return sock


class ShmListener:
    """Listens on an abstract unix socket: no file to leave behind, seen in this net namespace."""

    mover = MOVER

    def __init__(self) -> None:
        name = f"trireme-kv-{secrets.token_hex(8)}"
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.bind(f"\0{name}")
        self.sock.listen(_BACKLOG)
        self.endpoint = DataEndpoint(MOVER, f"@{name}")

    def trusts(self, sock: socket.socket) -> bool:
        """Abstract sockets have no permissions: the kernel says whether it is the same user."""
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(raw)[1]) == os.getuid()

    def receive_hello(self, wire: DataSocket, deadline: float) -> tuple[bytes, int]:
        """The hello and the arena's descriptor, which is the caller's to close; -1: none came."""
        wire.arm(deadline)
        data, ancillary, _, _ = wire.sock.recvmsg(
            HELLO_BYTES, socket.CMSG_SPACE(array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
        )
        fds = array.array("i")
        for level, kind, raw in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
        for extra in fds[1:]:
            os.close(extra)
        return data, fds[0] if fds else -1

    def inlet(self, wire: DataSocket, fd: int, geometry: Geometry) -> "ShmInlet":
        """Raises TransferFailed when the descriptor is no arena of that geometry."""
        return ShmInlet(wire, map_peer(fd, geometry))


class ShmInlet:
    """The payload lies in the source's arena."""

    def __init__(self, wire: DataSocket, source: PeerArena) -> None:
        self._wire = wire
        self._source = source

    def refusal(self, frame: Frame) -> str:
        blocks = self._source.geometry.blocks
        bad = next((i for i in frame.block_ids if i >= blocks), None)
        if bad is not None:
            return f"block {bad} is out of range, the sender's arena has {blocks}"
        return f"{frame.inline_bytes} bytes of payload, shm has none" if frame.inline_bytes else ""

    def land(self, frame: Frame, views: Sequence[memoryview], deadline: float) -> None:
        """Copy block by block.  Raises TransferFailed (stale) and OSError (stopped, deadline)."""
        if frame.kind is Kind.PROBE:
            if frame.generations[0] != self._source.beacon:
                raise _stale("the mapped arena is not the sender's")
            return
        self._compare(frame, "before")
        for block_id, view in zip(frame.block_ids, views, strict=True):
            self._copy(self._source.block(block_id), view, deadline)
        self._compare(frame, "while")

    def _copy(self, source: memoryview, target: memoryview, deadline: float) -> None:
        """numpy lets other threads run while it copies; a memoryview assignment does not."""
        for at in range(0, len(target), _STEP_BYTES):
            self._wire.check(deadline)
            part = slice(at, at + _STEP_BYTES)
            np.copyto(np.frombuffer(target[part], np.uint8), np.frombuffer(source[part], np.uint8))

    def _compare(self, frame: Frame, when: str) -> None:
        now = self._source.generations
        for block_id, generation in zip(frame.block_ids, frame.generations, strict=True):
            if now[block_id] != generation:
                raise _stale(f"source block {block_id} changed hands {when} it was copied")

    def close(self) -> None:
        self._source.close()


def greet(sock: socket.socket, hello: bytes, fd: int) -> None:
    """Send the hello with the arena's descriptor.  Raises OSError."""
    if socket.send_fds(sock, [hello], [fd]) != len(hello):
        raise ConnectionError("the hello was cut")


def _stale(what: str) -> TransferFailed:
    return TransferFailed(f"stale: {what}; recompute", stage=Stage.TRANSFER)
