"""One try at serving one request on one placement, from Reserve to the last token.

    offer   Reserve on decode ─▶ Prefill on prefill ─▶ Accepted        (local: Prefill alone)
    stream  first token ─▶ PrefillDone ─▶ Attach on decode ─▶ tokens   (local: tokens alone)

Events reach it through `router.table`.  It raises what ended it; what to do then is
`router.retry`'s decision.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from core.errors import (
    DeadlineExceeded,
    InternalError,
    Refused,
    Stage,
    TransferFailed,
    TriremeError,
    WorkerLost,
)
from core.ids import WorkerId
from core.messages import Accepted, Attach, Call, Grant, Prefill, PrefillDone, Reserve, TokenEvent
from core.ports import WorkerPort
from core.spec import TimeoutSpec
from core.states import RequestEvent
from core.trace import TraceEvent
from router.generation import Life
from router.ledger import Ledger

R = TypeVar("R", Grant, Accepted)


@dataclass(frozen=True, slots=True)
class Seats:
    """The sessions of a placement; the same one twice means local."""

    prefill: WorkerPort
    decode: WorkerPort

    @property
    def local(self) -> bool:
        return self.prefill.info.worker_id == self.decode.info.worker_id


class Attempt:
    """`legs` are the workers that may hold something for `key`: whoever is still among them
    when the attempt ends has to be told Cancel.  `stage` is where it stands, for errors."""

    def __init__(self, life: Life, seats: Seats, ledger: Ledger, limits: TimeoutSpec) -> None:
        self.key = life.key
        self.legs: dict[WorkerId, WorkerPort] = {}
        self.stage = Stage.RESERVE
        self.accepted = False
        self._life = life
        self._seats = seats
        self._limits = limits
        self._tokens = life.tokens
        self._start = len(life.output.tokens)
        self._grant: Grant | None = None
        self._landed = False
        self._error: TriremeError | None = None
        self._news = asyncio.Event()
        first, second = seats.prefill.info, seats.decode.info
        self._prefill_hold = ledger.hold(first.worker_id, first.epoch, len(self._tokens))
        self._decode_hold = ledger.hold(second.worker_id, second.epoch, len(self._tokens))
        # All tokens on that worker are computed, and sent, before these or with them.
        self._ahead_s = limits.prefill_per_token_s * ledger.load(first.worker_id, first.epoch)

    def release(self) -> None:
        """Stop counting as load.  Idempotent."""
        self._prefill_hold.release()
        self._decode_hold.release()

    # ---------------------------------------------------------------- driven by the dispatcher

    async def offer(self) -> None:
        """Returns when the prefill worker took the job.  Raises Refused and any other error."""
        life, request = self._life, self._life.request
        if not self._seats.local:
            reserve = Reserve(self.key, self._tokens, request.salt)
            self._grant = await self._ask(self._seats.decode, reserve, Grant)
            life.move(RequestEvent.RESERVED)
            life.mark(TraceEvent.RESERVED)
        self.stage = Stage.PREFILL
        job = Prefill(
            self.key, self._tokens, request.sampling, self._start, request.salt, self._grant
        )
        await self._ask(self._seats.prefill, job, Accepted)
        self.accepted = True
        life.mark(TraceEvent.PREFILL_ACCEPTED)
        if self._seats.local:
            life.move(RequestEvent.LOCAL)

    async def stream(self) -> None:
        """Returns when the output is finished.  Raises what ended the attempt before."""
        output, limits = self._life.output, self._limits
        await self._until(self._grown_from(self._start), limits.prefill_s + self._ahead_s)
        if self._grant is not None:
            await self._until(lambda: self._landed, limits.transfer_s + self._ahead_s)
            if output.finish is None:
                await self._attach(self._grant)
        while output.finish is None:
            await self._until(self._grown_from(len(output.tokens)), limits.token_s)

    async def _attach(self, grant: Grant) -> None:
        life, tokens = self._life, self._life.output.tokens
        self.stage = Stage.ATTACH
        life.move(RequestEvent.PREFILLED)
        sampling = life.request.sampling
        attach = Attach(self.key, grant.lease_id, grant.epoch, tokens[-1], len(tokens), sampling)
        await self._ask(self._seats.decode, attach, Accepted)
        self.stage = Stage.DECODE
        life.move(RequestEvent.ATTACHED)
        life.mark(TraceEvent.ATTACHED)

    async def _ask(self, port: WorkerPort, ask: Call, kind: type[R]) -> R:
        worker = port.info.worker_id
        self.legs[worker] = port
        try:
            reply = await port.call(ask, self._limits.call_s)
        except TriremeError as error:
            if isinstance(error, Refused) and not self.accepted:
                del self.legs[worker]
                error.worker = worker
            raise self._named(error, worker) from error.__cause__
        if not isinstance(reply, kind):
            raise InternalError(
                f"{type(ask).__name__} was answered by {type(reply).__name__}; report this",
                stage=self.stage,
                worker=worker,
            )
        return reply

    async def _until(self, ready: Callable[[], bool], limit_s: float) -> None:
        """Wait for `ready` or the end of the output, whichever is first."""
        try:
            async with asyncio.timeout(limit_s):
                while self._life.output.finish is None and not ready():
                    if self._error is not None:
                        raise self._error
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            decoding = self.stage is Stage.DECODE
            port = self._seats.decode if decoding else self._seats.prefill
            raise DeadlineExceeded(
                f"nothing came within {limit_s:g} s; the worker hangs or its messages are lost",
                stage=self.stage,
                worker=port.info.worker_id,
            ) from None

    def _grown_from(self, count: int) -> Callable[[], bool]:
        return lambda: len(self._life.output.tokens) > count

    # ---------------------------------------------------------------- told by the table

    def on_tokens(self, worker: WorkerId, event: TokenEvent) -> None:
        """Straight to the client, whatever the driver is waiting for."""
        output = self._life.output
        before = len(output.tokens)
        try:
            fresh = output.accept(event)
        except TransferFailed as error:
            self._fail(worker, error)
            return
        if event.finish is not None:
            self.legs.pop(worker, None)
        if fresh:
            self._life.deliver(fresh)
            self._mark(before - self._start, len(output.tokens) - self._start)
        self._news.set()

    def on_prefilled(self, worker: WorkerId, done: PrefillDone) -> None:
        """The prefill worker's part is over."""
        self.on_tokens(worker, done.first)
        if self._landed:
            return
        self._landed = True
        self._prefill_hold.release()
        accounting = self._life.accounting
        if not self._life.prefilled:
            self._life.prefilled = True
            accounting.cached_tokens = done.cached_tokens
        accounting.expert_counts = done.expert_counts
        accounting.moved_blocks += done.moved_blocks
        accounting.moved_bytes += done.moved_bytes
        accounting.mover = done.mover or accounting.mover
        if self._seats.local:
            self._life.mark(TraceEvent.PREFILL_DONE)
        else:
            self.legs.pop(worker, None)
            self._life.mark(TraceEvent.TRANSFERRED)
        self._news.set()

    def on_failed(self, worker: WorkerId, error: TriremeError) -> None:
        """The worker gave up and holds nothing any more."""
        if self.legs.pop(worker, None) is not None:
            self._fail(worker, error)

    def on_lost(self, worker: WorkerId, reason: str) -> None:
        if self.legs.pop(worker, None) is not None:
            self._fail(worker, WorkerLost(f"the session ended: {reason}"))

    def _fail(self, worker: WorkerId, error: TriremeError) -> None:
        self._error = self._error or self._named(error, worker)
        self._news.set()

    def _mark(self, before: int, after: int) -> None:
        """before, after: tokens of this attempt."""
        if before == 0:
            self._life.mark(TraceEvent.FIRST_TOKEN)
            if self.stage is Stage.PREFILL:
                self.stage = Stage.DECODE if self._seats.local else Stage.TRANSFER
        if before < 2 <= after:
            self._life.mark(TraceEvent.SECOND_TOKEN)

    def _named(self, error: TriremeError, worker: WorkerId) -> TriremeError:
        """An error always says where and on whom."""
        if error.stage is Stage.EDGE:
            error.stage = self.stage
        error.worker = error.worker or worker
        return error
