"""The socket between the leader of a gang and another rank: plans one way, signs of life back.

Down: frames, each a length (4 bytes, big endian) and a body.  Up: single bytes, the marks below.
The end of it is the end of the other process, whatever ended it.
"""

import socket

MAPPED, LOADED, BEAT = b"m", b"l", b"."
_LENGTH_BYTES = 4


class Control:
    """One end.  A rank's two threads share theirs: one receives, the other sends beats."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, body: bytes) -> None:
        """A frame.  Raises OSError when the other end is gone, or by the socket's timeout."""
        self.sock.sendall(len(body).to_bytes(_LENGTH_BYTES, "big") + body)

    def receive(self) -> bytes | None:
        """The next frame; None when the other end is gone.  Waits as long as that lives."""
        size = self._exactly(_LENGTH_BYTES)
        return None if size is None else self._exactly(int.from_bytes(size, "big"))

    def mark(self, what: bytes) -> None:
        """Raises OSError when the other end is gone."""
        self.sock.sendall(what)

    def marks(self) -> bytes:
        """What was marked since; b"" when the other end is gone.  For a readable socket."""
        try:
            return self.sock.recv(1 << 12)
        except ConnectionError:
            return b""

    def _exactly(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self.sock.recv(min(size - len(parts), 1 << 20))
            except ConnectionError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)
