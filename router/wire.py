"""Raw ASGI, both directions, with deadlines: request body, disconnect, response.

Not Starlette's responses: theirs cancel from under `finally` blocks that still await, and watch
for a disconnect in streams only.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from core.errors import BadRequest, BodyTooLarge, TriremeError
from router.schema_errors import dumps, error_body, error_headers

T = TypeVar("T")

BODY_S = 60.0
SEND_S = 60.0
CLOSE_S = 5.0


async def read_body(scope: Scope, receive: Receive, most: int) -> bytes:
    """The request body.  Raises BodyTooLarge, from the header alone if that tells; BadRequest
    when it is not there in BODY_S; ClientDisconnect."""
    announced = Headers(scope=scope).get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > most:
        raise _too_large(most)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > most:
                    raise _too_large(most)
    except TimeoutError:
        raise BadRequest(f"the request body did not arrive within {BODY_S:g} s") from None
    return bytes(body)


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {most} bytes (http.max_body_bytes); shorten it")


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of `work`, which is cancelled when the client goes away (ClientDisconnect) or
    the caller is cancelled.  The body has been read: only a disconnect is left to receive.

    Waits for `work` to clean up, CLOSE_S at most.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        left = not task.done()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait((task, gone), timeout=CLOSE_S)
    if left:
        raise ClientDisconnect
    return task.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Reply:
    """The response; either one JSON body or server-sent events, whose headers go out with the
    first of them.  Every method raises ClientDisconnect when the client does not take it in SEND_S.

    status: what was sent, 0 before.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def json(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        await self._start(status, {"content-type": "application/json", **headers})
        await self._body(body, more=False)

    async def event(self, data: bytes) -> None:
        if not self.status:
            await self._start(200, _EVENTS)
        await self._body(data, more=True)

    async def last_event(self, data: bytes) -> None:
        await self._body(data, more=False)

    async def fail(self, error: TriremeError) -> None:
        """The terminal error: an answer of its own, or, mid-stream, the last event.

        No [DONE] follows it: that marks a complete answer.
        """
        body = dumps(error_body(error))
        if self.status:
            await self.last_event(b"data: " + body + b"\n\n")
        else:
            await self.json(error.status, body, error_headers(error))

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": raw})

    async def _body(self, body: bytes, more: bool) -> None:
        await self._put({"type": "http.response.body", "body": body, "more_body": more})

    async def _put(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(SEND_S):
                await self._send(message)
        except OSError:
            raise ClientDisconnect from None


_EVENTS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
