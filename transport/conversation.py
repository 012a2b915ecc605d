"""The worker's end of one session: Hello, then calls and notices in, replies and events out.

`session_server.py` accepts streams and runs one Conversation on each; what the messages mean is
the `SessionHandler`'s business.
"""

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, assert_never

import grpc

from core.errors import Incompatible, InternalError, Refused, Stage, TriremeError
from core.messages import (
    WIRE_VERSION,
    Abort,
    Accepted,
    Attach,
    AttemptFailed,
    Call,
    Cancel,
    Fault,
    Grant,
    Hello,
    Notice,
    Prefill,
    PrefillDone,
    Renew,
    Reply,
    Reserve,
    StepEvents,
    Welcome,
    WorkerReport,
)
from transport.call_log import CallLog
from transport.codec import Envelope, ProtocolError
from transport.faulty import FaultInjector
from transport.outbox import Outbox, Sealed, pump
from transport.session import ServerSession, SessionCounts, SessionHandler
from transport.wire import SessionLimits, seal, unseal

logger = logging.getLogger(__name__)


class Conversation:
    """One stream, from its first byte to `on_close`.  Lives on the event loop."""

    def __init__(
        self,
        stream: Any,
        handler: SessionHandler,
        faults: FaultInjector,
        limits: SessionLimits,
        counts: SessionCounts,
    ) -> None:
        """stream: the grpc.aio servicer context, frames in and out as bytes."""
        self._stream = stream
        self._handler = handler
        self._faults = faults
        self._limits = limits
        self._counts = counts
        self._outbox = Outbox(limits.outbox, self._on_full)
        self._log: CallLog[Sealed] = CallLog(limits.remembered)
        self._calls: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._session: ServerSession | None = None
        self._worker = ""

    async def run(self) -> str:
        """Until either side ends the session.  Returns why."""
        reader = asyncio.create_task(self._read_all())
        sender = asyncio.create_task(self._send_all())
        drain_s = 0.0
        try:
            reason = await self._ended
            drain_s = self._limits.close_s
        finally:
            # Ended from outside (the client is gone) there is nobody to drain to.
            try:
                await self._wind_down(reader, sender, drain_s)
            finally:
                self._close()
        return reason

    def end(self, reason: str) -> None:
        """Send what waits, then end the stream.  The first reason holds."""
        if not self._ended.done():
            self._ended.set_result(reason)

    def _on_full(self) -> None:
        self._counts.slow_peers += 1
        logger.warning(
            "session %s: %d messages wait and the peer does not read; closing it",
            self._name(),
            self._limits.outbox,
        )
        self.end("this peer does not read its messages")

    # ------------------------------------------------------------------------------ tasks

    async def _read_all(self) -> None:
        try:
            async with asyncio.timeout(self._limits.hello_s):
                self._greet(unseal(await self._next_frame()))
            while not self._ended.done():
                self._receive(unseal(await self._next_frame()))
        except TimeoutError:
            self.end(f"no Hello within {self._limits.hello_s} s")
        except EOFError:
            self.end("the client closed the session")
        except ProtocolError as error:
            self._counts.protocol_errors += 1
            logger.warning("session %s: protocol error: %s", self._name(), error.message)
            self.end(f"protocol error: {error.message}")
        except grpc.aio.BaseError as error:
            self.end(f"the stream broke: {error}")
        except Exception:
            logger.exception("session %s: reading failed", self._name())
            self.end("internal error on the worker; see its log")

    async def _next_frame(self) -> bytes:
        """Raises EOFError when the client has closed its half."""
        data = await self._stream.read()
        if data is grpc.aio.EOF:
            raise EOFError
        assert isinstance(data, bytes)
        return data

    async def _send_all(self) -> None:
        try:
            await pump(self._outbox, self._stream.write, self._faults)
        except grpc.aio.BaseError as error:
            self.end(f"the stream broke: {error}")
        except Exception:
            logger.exception("session %s: sending failed", self._name())
            self.end("internal error on the worker; see its log")

    async def _wind_down(
        self, reader: asyncio.Task[None], sender: asyncio.Task[None], drain_s: float
    ) -> None:
        for task in (reader, *self._calls):
            task.cancel()
        await asyncio.wait((reader, *self._calls), timeout=self._limits.close_s)
        self._outbox.close()
        await asyncio.wait((sender,), timeout=drain_s)
        sender.cancel()

    def _close(self) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        try:
            self._handler.on_close(session)
        except Exception:
            logger.exception("session %s: on_close failed", session.owner)

    # --------------------------------------------------------------------------- messages

    def _greet(self, envelope: Envelope) -> None:
        hello = envelope.message
        if not isinstance(hello, Hello):
            raise ProtocolError(f"the first message is {type(hello).__name__}, not Hello")
        self._admit(envelope.id)
        answer = self._welcome(hello)
        sealed = Sealed(type(answer).__name__, seal(Envelope(answer, reply_to=envelope.id)))
        self._log.answered(envelope.id, sealed)
        self._outbox.put_first(sealed)
        if isinstance(answer, Fault):
            self.end(f"refused: {answer.message}")

    def _welcome(self, hello: Hello) -> Welcome | Fault:
        session = ServerSession(hello, self._outbox)
        try:
            if hello.wire_version != WIRE_VERSION:
                raise Incompatible(
                    f"wire_version differs: {WIRE_VERSION} here, {hello.wire_version} there; "
                    "start both from the same release",
                    stage=Stage.START,
                    field="wire_version",
                )
            welcome = self._handler.welcome(hello, session)
        except TriremeError as error:
            return Fault.of(error)
        except Exception:
            logger.exception("welcoming %s failed", hello.sender)
            return Fault.of(_internal("welcome"))
        self._session = session
        self._worker = welcome.info.worker_id
        self._counts.sessions += 1
        return welcome

    def _receive(self, envelope: Envelope) -> None:
        message = envelope.message
        match message:
            case Reserve() | Prefill() | Attach() | Cancel() | Hello():
                self._call(envelope.id, message)
            case Renew() | Abort():
                self._notice(message)
            case Welcome() | Grant() | Accepted() | Fault():
                self._counts.unknown_replies += 1
            case StepEvents() | PrefillDone() | AttemptFailed() | WorkerReport():
                raise ProtocolError(f"{type(message).__name__} comes from workers only")
            case _:
                assert_never(message)

    def _notice(self, notice: Notice) -> None:
        assert self._session is not None
        try:
            self._handler.on_notice(self._session, notice)
        except Exception:
            logger.exception("session %s: %s failed", self._name(), type(notice).__name__)

    def _call(self, call_id: int, call: Call) -> None:
        if not self._admit(call_id):
            self._counts.duplicate_calls += 1
            reply = self._log.reply(call_id)
            if reply is not None:
                self._outbox.put(reply)
            return
        if isinstance(call, Hello):
            raise ProtocolError("a second Hello")
        task = asyncio.create_task(self._run_call(call_id, call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def _admit(self, call_id: int) -> bool:
        if call_id == 0:
            raise ProtocolError("a call without an id")
        return self._log.admit(call_id)

    async def _run_call(self, call_id: int, call: Call) -> None:
        reply = await self._reply(call)
        try:
            sealed = Sealed(type(reply).__name__, seal(Envelope(reply, reply_to=call_id)))
        except TriremeError as error:
            logger.exception("session %s: the reply is lost", self._name())
            sealed = Sealed("Fault", seal(Envelope(Fault.of(error, self._worker), 0, call_id)))
        self._log.answered(call_id, sealed)
        self._outbox.put(sealed)

    async def _reply(self, call: Call) -> Reply:
        assert self._session is not None
        name = type(call).__name__
        try:
            if self._log.running > self._limits.running:
                raise Refused(
                    f"{self._limits.running} calls of this session run; try another worker"
                )
            answer = self._handler.on_call(self._session, call)
            return await answer if isinstance(answer, Awaitable) else answer
        except TriremeError as error:
            return Fault.of(error, self._worker)
        except Exception:
            logger.exception("session %s: %s failed", self._name(), name)
            return Fault.of(_internal(name), self._worker)

    def _name(self) -> str:
        return self._session.owner if self._session else str(self._stream.peer())


def _internal(what: str) -> InternalError:
    return InternalError(f"{what} failed in the worker; its log has the traceback")
