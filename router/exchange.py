"""One generating request from its first byte to its one end, streamed or whole.

    body ─▶ prepare ─▶ generations ─▶ pieces ─▶ answer          any error: one terminal error
                       └──── raced against the client's disconnect ────┘

Headers go out with the first text, or the first keep-alive, so that a failure before that has
its own HTTP status.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TypeAlias

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from core.errors import TriremeError
from router.answers import Answer
from router.edge import EdgeContext
from router.metrics import Outcome
from router.prepare import Job
from router.schema_errors import internal
from router.streaming import Piece, TextGeneration, merge
from router.wire import Reply, read_body, unless_gone

log = logging.getLogger(__name__)

Prepare: TypeAlias = Callable[[EdgeContext, bytes], Job]

_KEEP_ALIVE = b": keep-alive\n\n"


class Exchange:
    """An ASGI endpoint for POST requests that generate."""

    def __init__(self, edge: EdgeContext, route: str, prepare: Prepare) -> None:
        self._edge = edge
        self._route = route
        self._prepare = prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        edge, reply = self._edge, Reply(send)
        arrived = edge.clock()
        outcome, status = Outcome.CANCELLED, 499
        edge.metrics.in_flight.inc()
        try:
            outcome = await self._serve(scope, receive, reply, arrived)
            status = reply.status
        except ClientDisconnect:
            log.info("%s: the client went away", self._route)
        finally:
            edge.metrics.in_flight.dec()
            edge.metrics.ended(self._route, outcome, status, edge.clock() - arrived)

    async def _serve(self, scope: Scope, receive: Receive, reply: Reply, arrived: float) -> Outcome:
        """The boundary where foreign exceptions become ours.  Raises ClientDisconnect."""
        try:
            body = await read_body(scope, receive, self._edge.http.max_body_bytes)
            job = await asyncio.to_thread(self._prepare, self._edge, body)
            if job.options.stream:
                ending = await unless_gone(self._stream(job, reply, arrived), receive)
                await reply.last_event(ending)
            else:
                whole = await unless_gone(self._whole(job, arrived), receive)
                await reply.json(200, whole, {})
        except ClientDisconnect:
            raise
        except TriremeError as error:
            await reply.fail(error)
            return Outcome.of_error(reply.status)
        except Exception:
            log.exception("%s: unexpected", self._route)
            await reply.fail(internal())
            return Outcome.FAILED
        return Outcome.FINISHED

    async def _stream(self, job: Job, reply: Reply, arrived: float) -> bytes:
        """Sends all but the end of the stream, which it returns."""
        async with self._generate(job, arrived) as (answer, pieces):
            async for piece in pieces:
                await reply.event(answer.chunks(piece) if piece else _KEEP_ALIVE)
        return answer.ending()

    async def _whole(self, job: Job, arrived: float) -> bytes:
        async with self._generate(job, arrived) as (answer, pieces):
            return answer.whole([piece async for piece in pieces if piece])

    @asynccontextmanager
    async def _generate(
        self, job: Job, arrived: float
    ) -> AsyncIterator[tuple[Answer, AsyncGenerator[Piece | None, None]]]:
        """Starts all generations of the job; leaving it closes and counts every one of them."""
        edge = self._edge
        generations = [
            TextGeneration(index, request, edge.tokenizer, job.options.stops)
            for index, request in enumerate(job.requests)
        ]
        streams = [generation.pieces(edge.generator, edge.clock) for generation in generations]
        try:
            async with aclosing(merge(streams, edge.keep_alive_s)) as pieces:
                yield Answer(job, generations, edge.tokenizer, arrived), pieces
        finally:
            for generation in generations:
                edge.metrics.generation(generation, arrived)
