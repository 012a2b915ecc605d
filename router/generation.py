"""A running generation from both ends: `Life` for the dispatcher, `Running` for the consumer.

    driver task ──▶ Life ──▶ Channel ◀── Running ◀── consumer

Nothing on the left refers to `Running`: when the consumer drops it, the driver is cancelled.
"""

import asyncio
import weakref
from dataclasses import dataclass, field

from core.clock import Clock
from core.errors import TriremeError
from core.ids import AttemptKey, WorkerId
from core.states import REQUEST, RequestEvent, RequestState, advance
from core.trace import TraceEvent
from router.output import Output
from router.request import Accounting, Generate, Token

_OVERTAKEN = {
    RequestState.RESERVING: RequestEvent.LOCAL,
    RequestState.ATTACHING: RequestEvent.ATTACHED,
}
"""The last token came before the reply that the job was accepted: then it was."""


class Channel:
    """Tokens on their way to one consumer, at most max_tokens of them; then one end."""

    def __init__(self) -> None:
        self._tokens: list[Token] = []
        self._open = True
        self._error: TriremeError | None = None
        self._news = asyncio.Event()

    def put(self, tokens: tuple[Token, ...]) -> None:
        self._tokens += tokens
        self._news.set()

    def close(self, error: TriremeError | None) -> None:
        self._open, self._error = False, error
        self._news.set()

    async def get(self) -> tuple[Token, ...]:
        """All tokens that came since the last call; () after the end.  Raises the error once.

        Needs no deadline of its own: the driver's every wait has one, and its end closes this.
        """
        while self._open and not self._tokens:
            self._news.clear()
            await self._news.wait()
        tokens, self._tokens = tuple(self._tokens), []
        if not tokens and self._error is not None:
            error, self._error = self._error, None
            raise error
        return tokens


@dataclass(slots=True)
class Life:
    """What the dispatcher knows of one request; only its driver and its attempts write it.

    ticket: order of arrival.  tries: attempts so far, refused ones included; numbers the keys.
    refused: workers that said no since the request last waited, with their hints in seconds.
    avoid: workers that failed it.  recompute_on: where the next attempt shall run whole.
    deadline: when waiting for acceptance ends, on the event loop's clock.
    """

    request: Generate
    ticket: int
    clock: Clock
    accounting: Accounting
    output: Output
    channel: Channel = field(default_factory=Channel)
    state: RequestState = RequestState.RECEIVED
    tries: int = 0
    refused: dict[WorkerId, float] = field(default_factory=dict)
    last_refusal: str = ""
    avoid: set[WorkerId] = field(default_factory=set)
    recompute_on: WorkerId | None = None
    deadline: float = 0.0
    prefilled: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """What the next attempt has to prefill: the prompt and all output so far."""
        return self.request.tokens + tuple(self.output.tokens)

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.request.request_id, self.tries)

    def move(self, event: RequestEvent) -> None:
        self.state = advance(REQUEST, self.state, event)

    def mark(self, event: TraceEvent) -> None:
        self.accounting.trace.mark(event, self.clock())

    def deliver(self, tokens: tuple[Token, ...]) -> None:
        self.accounting.completion_tokens += len(tokens)
        self.channel.put(tokens)

    def end(self, event: RequestEvent, error: TriremeError | None) -> None:
        """The one terminal outcome; nothing reaches the consumer after it."""
        self.channel.close(error)
        if event is RequestEvent.FINISH:
            self.accounting.finish = self.output.finish
            if self.state in _OVERTAKEN:
                self.move(_OVERTAKEN[self.state])
        self.move(event)
        self.mark(TraceEvent.ENDED)


class Running:
    """`router.request.Generation`.  For one consumer."""

    def __init__(self, life: Life, driver: asyncio.Task[None], close_s: float) -> None:
        self.accounting = life.accounting
        self._channel = life.channel
        self._driver = driver
        self._close_s = close_s
        dropped = weakref.finalize(self, _cancel, asyncio.get_running_loop(), driver)
        dropped.atexit = False

    def __aiter__(self) -> "Running":
        return self

    async def __anext__(self) -> tuple[Token, ...]:
        try:
            tokens = await self._channel.get()
        except asyncio.CancelledError:
            self._driver.cancel()
            raise
        if not tokens:
            raise StopAsyncIteration
        return tokens

    async def aclose(self) -> None:
        """Cancel, and wait for the driver to have let go: its cancels are then on their way."""
        self._driver.cancel()
        await asyncio.wait([self._driver], timeout=self._close_s)


def _cancel(loop: asyncio.AbstractEventLoop, driver: "asyncio.Task[None]") -> None:
    """Runs in whatever thread collects garbage."""
    if not driver.done() and not loop.is_closed():
        loop.call_soon_threadsafe(driver.cancel)
