"""What a worker answers on its sessions: calls go to the engine, engine output to sessions."""

import logging
import secrets
import threading
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from core.errors import Incompatible, Stage, Unavailable
from core.ids import Epoch
from core.kvlayout import Compatibility
from core.messages import (
    Abort,
    Accepted,
    Attach,
    Call,
    Cancel,
    DataEndpoint,
    Event,
    Hello,
    HostFacts,
    Notice,
    Prefill,
    Renew,
    Reply,
    Reserve,
    Welcome,
    WorkerInfo,
)
from core.ports import StepOutput
from engine.loop import Engine
from transport.data_server import DataServer
from transport.session_server import ServerSession

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """What this worker says of itself on every session."""

    info: WorkerInfo
    compat: Compatibility
    host: HostFacts
    endpoints: tuple[DataEndpoint, ...]


@dataclass(frozen=True, slots=True)
class Serving:
    """What a started worker serves with."""

    engine: Engine
    data: DataServer
    identity: Identity


class WorkerService:
    """`transport.session_server.SessionHandler` over an engine.

    The address is known only once the server listens, and the engine signs grants with it:
    hence `bind`, before anybody can know the address.
    """

    def __init__(self) -> None:
        self._serving: Serving | None = None
        self._sessions: dict[str, ServerSession] = {}
        self._lock = threading.Lock()

    def bind(self, serving: Serving) -> None:
        self._serving = serving

    @property
    def serving(self) -> Serving:
        """Raises Unavailable before `bind`."""
        if self._serving is None:
            raise Unavailable("this worker is still starting; try again", stage=Stage.START)
        return self._serving

    def welcome(self, hello: Hello, session: ServerSession) -> Welcome:
        me = self.serving.identity
        if hello.epoch not in (Epoch(0), me.info.epoch):
            raise Incompatible(
                f"this is epoch {me.info.epoch}, {hello.epoch} is gone; look the worker up again",
                stage=Stage.START,
                worker=me.info.worker_id,
                field="epoch",
            )
        link_key = secrets.token_bytes(32)
        if hello.compat is not None:
            hello.compat.check(me.compat, me.info.worker_id)
            self.serving.data.admit(session.owner, link_key)
        with self._lock:
            self._sessions[session.owner] = session
        return Welcome(me.info, me.compat, me.host, me.endpoints, link_key)

    def on_call(self, session: ServerSession, call: Call) -> Reply:
        engine = self.serving.engine
        match call:
            case Reserve():
                return engine.reserve(call, session.owner)
            case Prefill():
                engine.prefill(call, session.owner)
            case Attach():
                engine.attach(call, session.owner)
            case Cancel():
                engine.cancel(call.key, session.owner)
            case Hello():
                raise Incompatible("Hello comes once, first", stage=Stage.START, field="hello")
            case _:
                assert_never(call)
        return Accepted(call.key)

    def on_notice(self, session: ServerSession, notice: Notice) -> None:
        match notice:
            case Renew():
                self.serving.engine.renew(notice.keys, session.owner)
            case Abort():
                log.info("%s: the sender gave up: %s", notice.key, notice.reason)
                self.serving.engine.abort_lease(notice.key, notice.lease_id)
            case _:
                assert_never(notice)

    def on_close(self, session: ServerSession) -> None:
        """The peer is gone: so is everything it owned, and no byte of it may land any more."""
        with self._lock:
            self._sessions.pop(session.owner, None)
        dropped = self.serving.engine.drop_owner(session.owner)
        if dropped:
            log.warning("session %s ended with %d attempts running", session.owner, dropped)
        expel = partial(self.serving.data.expel, session.owner)
        threading.Thread(target=expel, name="expel", daemon=True).start()

    def emit(self, owner: str, event: Event) -> None:
        """Thread-safe.  An owner that is gone has no use for its events."""
        with self._lock:
            session = self._sessions.get(owner)
        if session is not None:
            session.send(event)

    def emit_all(self, output: StepOutput) -> None:
        for owner, event in output.events:
            self.emit(owner, event)

    def broadcast(self, event: Event) -> None:
        with self._lock:
            sessions = tuple(self._sessions.values())
        for session in sessions:
            session.send(event)
