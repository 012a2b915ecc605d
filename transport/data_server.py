"""The receiving end of the data plane: who may connect, and when nothing of them can land.

One accepting thread, one receiver thread per connection.  A link key belongs to a
peer (one session of it); `expel` fences that peer.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections import Counter as Tally
from dataclasses import dataclass, field

from core import messages
from core.errors import Stage, TransferFailed, TriremeError
from core.kvlayout import KVLayout
from core.messages import DataEndpoint
from core.ports import Arena, Landing, MoveState
from core.spec import TimeoutSpec, TransportSpec
from transport import data_hello as hellos
from transport import shm, tcp
from transport.arena import Geometry
from transport.data_acceptor import DataAcceptor, Listener
from transport.data_hello import Hello
from transport.data_receiver import Destination, Inlet, Receiver
from transport.data_socket import DataSocket
from transport.frame import Answer, encode_answer

log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 512


@dataclass(slots=True, eq=False)
class _Connection:
    """peer is empty until the hello was proved; the thread owns the wire."""

    wire: DataSocket
    thread: threading.Thread = field(default_factory=threading.Thread)
    peer: str = ""


class DataServer:
    """Listens from construction to `close`.  Thread-safe.  Raises OSError when it cannot listen."""

    def __init__(
        self,
        landing: Landing,
        arena: Arena,
        layout: KVLayout,
        transport: TransportSpec,
        timeouts: TimeoutSpec,
        host: str,
    ) -> None:
        self._destination = Destination(landing, arena, layout, timeouts.transfer_s)
        self._connect_s, self._fence_s = timeouts.connect_s, timeouts.transfer_s
        self._lock = threading.Lock()
        self._keys: dict[bytes, tuple[str, bytes]] = {}
        self._connections: set[_Connection] = set()
        self._tally: Tally[str] = Tally()
        self._closing = False
        self._listeners: list[Listener] = []
        if transport.mover != tcp.MOVER:
            self._listeners.append(shm.ShmListener())
        if transport.mover != shm.MOVER:
            self._listeners.append(tcp.TcpListener(host, transport.congestion))
        self._acceptor = DataAcceptor(self._listeners, self._start)

    @property
    def endpoints(self) -> tuple[DataEndpoint, ...]:
        """Fastest first; for `Welcome`."""
        return tuple(each.endpoint for each in self._listeners)

    def counters(self) -> tuple[messages.Counter, ...]:
        """Totals: data_blocks_landed, data_frames_gone, data_frames_failed, data_refused."""
        with self._lock:
            return tuple(messages.Counter(n, v) for n, v in sorted(self._tally.items()))

    def admit(self, peer: str, link_key: bytes) -> None:
        """Whoever proves to have `link_key` is `peer` from now on, until `expel(peer)`."""
        if len(link_key) < hellos.MIN_KEY_BYTES:
            raise ValueError(f"a link key has at least {hellos.MIN_KEY_BYTES} bytes")
        with self._lock:
            self._keys[hellos.key_id(link_key)] = (peer, link_key)

    def expel(self, peer: str) -> bool:
        """Void the peer's keys and close its connections; True: no byte of it can land any more.

        Blocks until its receivers stopped, for `transfer_s` at most.  After False the blocks a
        late receiver writes are still protected: its `Landing.end` has not been called.
        """
        with self._lock:
            self._keys = {k: v for k, v in self._keys.items() if v[0] != peer}
            theirs = [c for c in self._connections if c.peer == peer]
        return self._stop(theirs)

    def close(self) -> bool:
        """Stop listening and expel everybody; True: no byte can land any more."""
        with self._lock:
            self._closing = True
            everybody = list(self._connections)
            self._keys.clear()
        self._acceptor.close(self._fence_s)
        return self._stop(everybody)

    def _stop(self, connections: list[_Connection]) -> bool:
        deadline = time.monotonic() + self._fence_s
        for each in connections:
            each.wire.stop()
        for each in connections:
            each.thread.join(max(0.0, deadline - time.monotonic()))
        late = [each.thread.name for each in connections if each.thread.is_alive()]
        if late:
            log.error("data receivers still run after %.1f s: %s", self._fence_s, late)
        return not late

    def _count(self, name: str, amount: int) -> None:
        with self._lock:
            self._tally[name] += amount

    def _start(self, listener: Listener, sock: socket.socket) -> None:
        connection = _Connection(DataSocket(sock))
        with self._lock:
            full = len(self._connections) >= _MAX_CONNECTIONS
            if full or self._closing or not listener.trusts(sock):
                self._tally["data_refused"] += 1
                sock.close()
                return
            connection.thread = threading.Thread(
                target=self._serve,
                args=(listener, connection),
                name=f"data-receive-{listener.mover}",
                daemon=True,
            )
            self._connections.add(connection)
            connection.thread.start()

    def _serve(self, listener: Listener, connection: _Connection) -> None:
        """The life of a connection.  Closing the wire tells the peer that we read no more."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._forget, connection)
            stack.callback(connection.wire.close)
            try:
                inlet = self._greet(listener, connection, stack)
                if inlet:
                    Receiver(connection.wire, inlet, self._destination, self._count).run()
            except OSError as error:
                log.info("data connection of %s ended: %s", connection.peer or "nobody", error)
            except TriremeError as error:
                log.error("data connection of %s broke: %s", connection.peer or "nobody", error)

    def _forget(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.discard(connection)

    def _greet(
        self, listener: Listener, connection: _Connection, stack: contextlib.ExitStack
    ) -> Inlet | None:
        """Challenge, hello, answer.  None: refused.  Raises OSError, TransferFailed."""
        wire, deadline = connection.wire, time.monotonic() + self._connect_s
        challenge = secrets.token_bytes(hellos.CHALLENGE_BYTES)
        wire.send([challenge], deadline)
        data, fd = listener.receive_hello(wire, deadline)
        inlet: Inlet | None = None
        try:
            hello = hellos.decode_hello(data)
            if not self._prove(hello, challenge, listener.mover, connection):
                self._count("data_refused", 1)
                log.warning("data plane %s refused a connection: unknown key", listener.mover)
                return None
            inlet = listener.inlet(wire, fd, self._checked(hello.geometry))
            stack.callback(inlet.close)
            answer = Answer(0, MoveState.DONE)
        except TransferFailed as error:
            self._count("data_refused", 1)
            answer = Answer(0, MoveState.FAILED, error.message)
        finally:
            if fd >= 0:
                os.close(fd)  # a mapping keeps its own
        wire.send([encode_answer(answer)], deadline)
        return inlet

    def _checked(self, theirs: Geometry) -> Geometry:
        mine = self._destination.layout.block_bytes
        if theirs.block_bytes != mine:
            raise TransferFailed(
                f"blocks of {theirs.block_bytes} bytes there, {mine} here; "
                "start both workers with the same model and block size",
                stage=Stage.TRANSFER,
            )
        return theirs

    def _prove(self, hello: Hello, challenge: bytes, mover: str, connection: _Connection) -> bool:
        """Under one lock with `expel`: a connection is either refused or found by it."""
        with self._lock:
            peer, link_key = self._keys.get(hello.key_id, ("", b""))
            if not link_key or not hello.proves(link_key, challenge, mover):
                return False
            connection.peer = peer
            return True
