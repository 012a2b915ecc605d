"""What a worker sees of sessions: the client's side as a value, and the handler it provides."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol
from uuid import uuid4

from core.messages import Call, Event, Hello, Notice, Reply, Welcome
from transport.outbox import Outbox


class ServerSession:
    """A welcomed client.  owner: unique per session; what the client has here is filed under it."""

    def __init__(self, hello: Hello, outbox: Outbox) -> None:
        self.owner = f"{hello.sender}/{uuid4().hex}"
        self.hello = hello
        self._outbox = outbox

    def send(self, event: Event) -> None:
        """Queue an event; order is kept, a newer WorkerReport replaces a waiting one.

        From any thread, never blocks.  After the session's end events are dropped: `on_close`
        tells who cares.
        """
        self._outbox.put(event)


class SessionHandler(Protocol):
    """What a worker does with sessions.  All on the event loop, none may block it.

    A TriremeError raised from `welcome` or `on_call` travels as a Fault and arrives as the same
    error; anything else arrives as InternalError and is logged here.
    """

    def welcome(self, hello: Hello, session: ServerSession) -> Welcome:
        """Raising refuses the client and ends the stream; `on_close` does not follow."""
        ...

    def on_call(self, session: ServerSession, call: Call) -> Reply | Awaitable[Reply]:
        """Reserve, Prefill, Attach or Cancel.  A plain function where the answer is at hand, a
        coroutine where it must wait; waiting calls are overtaken by later ones, and cancelled
        when the session ends."""
        ...

    def on_notice(self, session: ServerSession, notice: Notice) -> None: ...

    def on_close(self, session: ServerSession) -> None:
        """Exactly once per welcomed session, after its last call has ended."""
        ...


@dataclass(slots=True)
class SessionCounts:
    """Totals over all sessions of a server, or of one client session.  Written by the loop."""

    sessions: int = 0
    protocol_errors: int = 0
    duplicate_calls: int = 0
    unknown_replies: int = 0
    slow_peers: int = 0
