"""Generations as visible text: one path for streamed and whole answers.

`TextGeneration` turns the token batches of one generation into pieces of text; `merge` runs
several at once.  Both modes of an answer consume the same pieces, so their texts are equal.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from core.clock import Clock
from core.errors import InternalError, Stage
from core.messages import FinishReason
from core.ports import Tokenizer
from core.sampling import TokenLogprobs
from router.detok import Detokenizer
from router.request import Accounting, Generate, Generator, Token
from router.stops import StopMatcher


class TextToken(NamedTuple):
    """offset: whole characters before it in its output, those of a stop string included."""

    id: int
    offset: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that can be shown, of choice `index`.  Only the last piece of a choice, the one with
    `finish`, may have none.  tokens: all received since the piece before; so a token whose text
    is held back waits for it."""

    index: int
    text: str
    tokens: tuple[TextToken, ...]
    finish: FinishReason | None = None


class TextGeneration:
    """One generation and what the edge knows of it.  Owns it: closes it exactly once.

    completion_tokens counts up to the token that completed a stop string, that one included,
    however tokens are batched.  Stop strings are not looked for in the first min_tokens tokens.
    first_at, last_at: arrival of the first and the latest token.
    """

    def __init__(
        self, index: int, request: Generate, tokenizer: Tokenizer, stops: Sequence[str]
    ) -> None:
        self.index = index
        self.request = request
        self.accounting = Accounting(prompt_tokens=len(request.tokens))
        self.completion_tokens = 0
        self.first_at: float | None = None
        self.last_at: float | None = None
        self._detok = Detokenizer(tokenizer)
        self._stops = StopMatcher(stops)
        self._fresh: list[TextToken] = []
        self._characters = 0

    async def pieces(self, generator: Generator, clock: Clock) -> AsyncGenerator[Piece, None]:
        """Ends after the piece with `finish`, or raises what the generation raises.

        Every wait for tokens has its deadline in the generation.  It is closed before the last
        piece goes out: a slow client cannot keep workers busy.
        """
        generation = await generator.generate(self.request)
        self.accounting = generation.accounting
        try:
            async for tokens in generation:
                self._stamp(clock())
                last = self._take(tokens)
                if last.finish:
                    break
                if last.text:
                    self._fresh.clear()
                    yield last
            else:
                last = self._end(generation.accounting.finish)
        finally:
            await generation.aclose()
        yield last

    def _stamp(self, now: float) -> None:
        self.first_at = now if self.first_at is None else self.first_at
        self.last_at = now

    def _take(self, tokens: Sequence[Token]) -> Piece:
        text = ""
        for token in tokens:
            self.completion_tokens += 1
            self._fresh.append(TextToken(token.id, self._characters, token.logprobs))
            fresh = self._detok.push((token.id,))
            self._characters += len(fresh)
            early = self.completion_tokens <= self.request.sampling.min_tokens
            text += fresh if early else self._stops.push(fresh)
            if self._stops.hit:
                return self._piece(text, FinishReason.STOP)
        return self._piece(text, None)

    def _end(self, finish: FinishReason | None) -> Piece:
        if finish is None:
            raise InternalError(
                f"generation {self.request.request_id} ended without a finish reason; report this",
                stage=Stage.DECODE,
            )
        text = self._stops.push(self._detok.finish()) + self._stops.finish()
        return self._piece(text, FinishReason.STOP if self._stops.hit else finish)

    def _piece(self, text: str, finish: FinishReason | None) -> Piece:
        return Piece(self.index, text, tuple(self._fresh), finish)


async def merge(
    streams: Sequence[AsyncGenerator[Piece, None]], silence_s: float
) -> AsyncGenerator[Piece | None, None]:
    """Pieces of all streams as they come; None after each `silence_s` without any.

    The first error ends it and closes the other streams, as does closing or cancelling it.
    """
    waiting: dict[asyncio.Task[Piece], AsyncIterator[Piece]] = {
        asyncio.ensure_future(_next(stream)): stream for stream in streams
    }
    try:
        while waiting:
            done, _ = await asyncio.wait(
                waiting, timeout=silence_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                yield None
            for task in [task for task in waiting if task in done]:
                piece = task.result()
                stream = waiting.pop(task)
                if piece.finish is None:
                    waiting[asyncio.ensure_future(_next(stream))] = stream
                yield piece
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncIterator[Piece]) -> Piece:
    return await anext(stream)
