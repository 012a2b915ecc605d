"""Blocks over TCP: `sendmsg` out of the source's arena, `recvmsg_into` the destination's blocks."""

import contextlib
import logging
import socket
from collections.abc import Sequence

from core.messages import DataEndpoint
from transport.arena import Geometry
from transport.data_hello import HELLO_BYTES
from transport.data_socket import DataSocket
from transport.frame import Frame

log = logging.getLogger(__name__)

MOVER = "tcp"
_BUFFER_BYTES = 4 << 20
_BACKLOG = 128


def dial(address: str, congestion: str, timeout_s: float) -> socket.socket:
    """Connect to "host:port".  Raises OSError."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise OSError(f"{address!r} is not host:port")
    sock = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
    _tune(sock, congestion)
    return sock


class TcpListener:
    """Listens on one interface, on a port that the system picks."""

    mover = MOVER

    def __init__(self, host: str, congestion: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.sock = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        _tune(self.sock, congestion)  # accepted sockets inherit all of it
        port = self.sock.getsockname()[1]
        self.endpoint = DataEndpoint(MOVER, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")

    def trusts(self, sock: socket.socket) -> bool:
        """Anybody may try; the link key decides."""
        return True

    def receive_hello(self, wire: DataSocket, deadline: float) -> tuple[bytes, int]:
        """The hello; no file descriptor comes over TCP (-1)."""
        return wire.receive(HELLO_BYTES, deadline), -1

    def inlet(self, wire: DataSocket, fd: int, geometry: Geometry) -> "TcpInlet":
        return TcpInlet(wire, geometry.block_bytes)


class TcpInlet:
    """The payload follows each header on the wire."""

    def __init__(self, wire: DataSocket, block_bytes: int) -> None:
        self._wire = wire
        self._block_bytes = block_bytes

    def refusal(self, frame: Frame) -> str:
        expected = frame.count * self._block_bytes
        if frame.inline_bytes == expected:
            return ""
        return f"{frame.inline_bytes} bytes of payload for {frame.count} blocks of {expected} bytes"

    def land(self, frame: Frame, views: Sequence[memoryview], deadline: float) -> None:
        """Fill `views`, one per block.  Raises OSError when the stream ends early."""
        self._wire.receive_into(views, deadline)

    def close(self) -> None:
        """Nothing but the wire is held, and that is the server's."""


def _tune(sock: socket.socket, congestion: str) -> None:
    """No delays, large buffers; an unknown congestion control costs speed only and is said."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    if not congestion:
        return
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    except OSError as error:
        log.warning("transport.congestion: %s is not available here: %s", congestion, error)
