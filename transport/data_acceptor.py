"""Waits for incoming data connections of all backends on one thread."""

import logging
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from core.messages import DataEndpoint
from transport.arena import Geometry
from transport.data_receiver import Inlet
from transport.data_socket import DataSocket

log = logging.getLogger(__name__)

_TICK_S = 60.0  # `close` wakes the thread at once
_PAUSE_S = 0.1


class Listener(Protocol):
    """The destination's half of a backend."""

    mover: str
    sock: socket.socket
    endpoint: DataEndpoint

    def trusts(self, sock: socket.socket) -> bool:
        """What the kernel says about who connected."""
        ...

    def receive_hello(self, wire: DataSocket, deadline: float) -> tuple[bytes, int]:
        """The hello and a file descriptor that is the caller's to close, or -1.  Raises OSError."""
        ...

    def inlet(self, wire: DataSocket, fd: int, geometry: Geometry) -> Inlet:
        """Raises TransferFailed when the peer's memory cannot be had."""
        ...


class DataAcceptor:
    """Owns the listening sockets from construction to `close`."""

    def __init__(
        self, listeners: Sequence[Listener], arrived: Callable[[Listener, socket.socket], None]
    ) -> None:
        self._listeners = listeners
        self._arrived = arrived
        self._closing = threading.Event()
        self._alarm, self._bell = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="data-accept", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """No connection arrives after this, unless the thread is stuck for `timeout_s`."""
        self._closing.set()
        self._bell.close()
        self._thread.join(timeout_s)
        for sock in (self._alarm, *(each.sock for each in self._listeners)):
            sock.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._alarm, selectors.EVENT_READ)
            for each in self._listeners:
                each.sock.setblocking(False)
                ready.register(each.sock, selectors.EVENT_READ, each)
            while not self._closing.is_set():
                for key, _ in ready.select(_TICK_S):
                    if key.data is not None:
                        self._accept(key.data)

    def _accept(self, listener: Listener) -> None:
        try:
            sock, _ = listener.sock.accept()
        except BlockingIOError:
            return  # it hung up already
        except OSError as error:  # out of descriptors: others must be closed first
            log.warning("data plane %s cannot accept: %s", listener.mover, error)
            self._closing.wait(_PAUSE_S)
            return
        self._arrived(listener, sock)
