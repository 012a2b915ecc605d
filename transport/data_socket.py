"""A connected stream socket whose every step has a deadline.

One thread uses it; any other may only `stop` or `finish` it.  Deadlines are points on the
monotonic clock, in seconds.  Raises OSError: ConnectionError when the stream ended, TimeoutError
when the deadline passed; whoever owns the socket translates them.
"""

import contextlib
import socket
import struct
import time
from collections.abc import Sequence
from typing import TypeAlias

Bytes: TypeAlias = bytes | bytearray | memoryview

_IOV_MAX = 1024
_SCRATCH_BYTES = 1 << 20
_LINGER_NOT = struct.pack("ii", 1, 0)  # struct linger: on, 0 s


class DataSocket:
    """Owns `sock`; `close` it from the thread that uses it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._stopped = False

    def send(self, buffers: Sequence[Bytes], deadline: float) -> None:
        """All bytes of all buffers, straight from where they lie."""
        views = [memoryview(b).cast("B") for b in buffers if len(b)]
        at = 0
        while at < len(views):
            self.arm(deadline)
            sent = self.sock.sendmsg(views[at : at + _IOV_MAX])
            at = _advance(views, at, sent)

    def receive_into(self, views: Sequence[memoryview], deadline: float) -> None:
        """Fill all views, straight into where they lie."""
        views = list(views)
        at = 0
        while at < len(views):
            self.arm(deadline)
            got = self.sock.recvmsg_into(views[at : at + _IOV_MAX])[0]
            if not got:
                raise ConnectionError("closed by the peer")
            at = _advance(views, at, got)

    def receive(self, size: int, deadline: float) -> bytes:
        data = bytearray(size)
        if size:
            self.receive_into([memoryview(data)], deadline)
        return bytes(data)

    def discard(self, size: int, deadline: float) -> None:
        """Read `size` bytes and drop them."""
        scratch = memoryview(bytearray(min(size, _SCRATCH_BYTES)))
        while size:
            part = scratch[: min(size, len(scratch))]
            self.receive_into([part], deadline)
            size -= len(part)

    def readable(self, timeout_s: float) -> bool:
        """Whether a byte, or the end of the stream, came within the time."""
        self.sock.settimeout(timeout_s)
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return False
        return True

    def arm(self, deadline: float) -> None:
        """The next call on `sock` ends by the deadline."""
        self.check(deadline)
        self.sock.settimeout(max(deadline - time.monotonic(), 1e-3))

    def check(self, deadline: float) -> None:
        """Raises when stopped or late; for work between I/O steps."""
        if self._stopped:
            raise ConnectionError("stopped here")
        if time.monotonic() >= deadline:
            raise TimeoutError("deadline passed")

    def finish(self) -> None:
        """Send no more, and wake a sender.  The peer sees the end and closes; see `wait_end`."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def wait_end(self, deadline: float) -> bool:
        """Whether the peer closed by then, so that it touches no memory for this stream."""
        try:
            while True:
                self.arm(deadline)
                if not self.sock.recv(_SCRATCH_BYTES):
                    return not self._stopped
        except TimeoutError:
            return False
        except OSError:  # reset: the peer closed, or is dead
            return not self._stopped

    def stop(self) -> None:
        """Wake the using thread; all it does from now on fails.  From any thread."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def abort(self) -> None:
        """Close and drop what the kernel has not sent yet."""
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        self.close()

    def close(self) -> None:
        self._stopped = True
        self.sock.close()


def _advance(views: list[memoryview], at: int, done: int) -> int:
    """Index of the first view with bytes left after `done` more bytes; that one is cut."""
    while at < len(views) and done >= len(views[at]):
        done -= len(views[at])
        at += 1
    if done:
        views[at] = views[at][done:]
    return at
