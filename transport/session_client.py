"""The caller's end of a session: a router's, or a prefill worker's towards decode workers."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, assert_never

import grpc

from core.errors import DeadlineExceeded, Stage, WorkerLost
from core.messages import (
    Abort,
    Accepted,
    Attach,
    AttemptFailed,
    Call,
    Cancel,
    Event,
    Fault,
    Grant,
    Hello,
    Message,
    Notice,
    Prefill,
    PrefillDone,
    Renew,
    Reply,
    Reserve,
    StepEvents,
    Welcome,
    WorkerInfo,
    WorkerReport,
)
from transport.codec import Envelope, ProtocolError
from transport.faulty import FaultInjector
from transport.outbox import Outbox, Sealed, pump
from transport.session import SessionCounts
from transport.wire import CHANNEL_OPTIONS, METHOD, SERVICE, SessionLimits, seal, unseal

logger = logging.getLogger(__name__)

_LIMITS = SessionLimits()

_STAGES: dict[type[Message], Stage] = {
    Hello: Stage.START,
    Reserve: Stage.RESERVE,
    Prefill: Stage.PREFILL,
    Attach: Stage.ATTACH,
    Cancel: Stage.DECODE,
    Renew: Stage.DECODE,
    Abort: Stage.TRANSFER,
}
"""What a request was about to do when its message failed."""


@dataclass(frozen=True, slots=True)
class _Pending:
    answer: "asyncio.Future[Reply | WorkerLost]"
    stage: Stage


class ClientSession:
    """A live session with one worker; satisfies `core.ports.WorkerPort`.  Made by `connect`.

    Everything runs on the loop that `connect` ran on.  welcome, info: what the worker said.
    """

    welcome: Welcome
    info: WorkerInfo

    def __init__(
        self,
        address: str,
        on_event: Callable[[Event], None],
        on_lost: Callable[[str], None],
        faults: FaultInjector | None,
    ) -> None:
        """Starts to connect; callers use `connect`."""
        self.counts = SessionCounts()
        self._worker = address
        self._on_event = on_event
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(_LIMITS.outbox, self._on_full)
        self._pending: dict[int, _Pending] = {}
        self._last_id = 0
        self._ended = ""
        # Set when `connect` succeeds: no event is delivered, and no loss reported, before.
        self._live = asyncio.Event()
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stream = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")()
        self._sender = asyncio.create_task(self._send_all(faults or FaultInjector()))
        self._reader = asyncio.create_task(self._read_all())

    @classmethod
    async def connect(
        cls,
        address: str,
        hello: Hello,
        on_event: Callable[[Event], None],
        on_lost: Callable[[str], None],
        connect_s: float,
        faults: FaultInjector | None = None,
    ) -> Self:
        """Open a session and greet.

        on_event: every event, in order, on the loop.  on_lost: once, with the reason, when the
        session ends for any cause but `close`; never when `connect` itself raises, which is
        DeadlineExceeded, WorkerLost, or the error with which the worker refused.
        """
        session = cls(address, on_event, on_lost, faults)
        try:
            welcome = await session.call(hello, connect_s)
            if not isinstance(welcome, Welcome):
                raise session._lost(f"Hello was answered by {type(welcome).__name__}", Stage.START)
            if session._ended:
                raise session._lost(session._ended, Stage.START)
        except BaseException:
            await session.close()
            raise
        session.welcome = welcome
        session.info = welcome.info
        session._worker = welcome.info.worker_id
        session._live.set()
        return session

    async def call(self, message: Call, timeout_s: float) -> Reply:
        """The worker's answer.  Raises the error that a Fault carries, DeadlineExceeded,
        WorkerLost, or InternalError and BodyTooLarge when the message cannot be sent."""
        name, stage = type(message).__name__, _STAGES[type(message)]
        self._last_id += 1
        call_id = self._last_id
        pending = _Pending(self._loop.create_future(), stage)
        self._pending[call_id] = pending
        try:
            self._send(Envelope(message, id=call_id))
            async with asyncio.timeout(timeout_s):
                reply = await pending.answer
        except TimeoutError:
            raise DeadlineExceeded(
                f"no answer to {name} within {timeout_s} s; try another worker",
                stage=stage,
                worker=self._worker,
            ) from None
        finally:
            del self._pending[call_id]
        if isinstance(reply, Fault):
            raise reply.error()
        if isinstance(reply, WorkerLost):
            raise reply
        return reply

    async def notify(self, message: Notice) -> None:
        """Send without an answer.  Raises WorkerLost."""
        self._send(Envelope(message))

    async def close(self) -> None:
        """Send what waits, then end the session; pending calls get WorkerLost.  Idempotent."""
        self._live.clear()
        self._outbox.close()
        await asyncio.wait((self._sender,), timeout=_LIMITS.close_s)
        self._end("closed by this side")
        self._reader.cancel()
        await asyncio.wait((self._reader,), timeout=_LIMITS.close_s)

    def _send(self, envelope: Envelope) -> None:
        kind = type(envelope.message)
        if not self._outbox.put(Sealed(kind.__name__, seal(envelope))):
            raise self._lost(self._ended or "closing", _STAGES[kind])

    def _lost(self, reason: str, stage: Stage) -> WorkerLost:
        return WorkerLost(
            f"the session ended: {reason}; try another worker", stage=stage, worker=self._worker
        )

    def _on_full(self) -> None:
        self.counts.slow_peers += 1
        self._end(f"{_LIMITS.outbox} messages wait and the worker does not read")

    def _end(self, reason: str) -> None:
        """The session is over, for the first of possibly many reasons."""
        if self._ended:
            return
        self._ended = reason
        self._outbox.close()
        self._stream.cancel()
        if self._live.is_set():
            logger.warning("session with %s lost: %s", self._worker, reason)
            # Before any pending call hears of it, so that a retry does not choose this worker.
            self._loop.call_soon(self._on_lost, reason)
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_result(self._lost(reason, pending.stage))

    # ------------------------------------------------------------------------------ tasks

    async def _send_all(self, faults: FaultInjector) -> None:
        try:
            await pump(self._outbox, self._stream.write, faults)
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            # The reader finds the same end, and knows why.
            return

    async def _read_all(self) -> None:
        reason = "internal error on this side; see its log"
        try:
            while (data := await self._stream.read()) is not grpc.aio.EOF:
                await self._receive(unseal(data))
            reason = "the worker ended the stream"
        except ProtocolError as error:
            self.counts.protocol_errors += 1
            reason = f"protocol error: {error.message}"
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except Exception:
            logger.exception("session with %s: reading failed", self._worker)
        finally:
            self._end(reason)
            self._sender.cancel()
            await self._channel.close()

    async def _receive(self, envelope: Envelope) -> None:
        message = envelope.message
        match message:
            case Welcome() | Grant() | Accepted() | Fault():
                self._answer(envelope.reply_to, message)
                if isinstance(message, Welcome):
                    await self._live.wait()
            case StepEvents() | PrefillDone() | AttemptFailed() | WorkerReport():
                # Before the Welcome only an injected fault can bring one.
                if self._live.is_set():
                    self._on_event(message)
            case Hello() | Reserve() | Prefill() | Attach() | Cancel() | Renew() | Abort():
                raise ProtocolError(f"{type(message).__name__} does not come from a worker")
            case _:
                assert_never(message)

    def _answer(self, call_id: int, reply: Reply) -> None:
        pending = self._pending.get(call_id)
        if pending is None or pending.answer.done():
            self.counts.unknown_replies += 1
        else:
            pending.answer.set_result(reply)
