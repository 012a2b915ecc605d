"""The output tokens of one request, put together from events of all its attempts.  Pure."""

from core.errors import Stage, TransferFailed
from core.messages import FinishReason, TokenEvent
from core.sampling import Sampling
from router.request import Token


class Output:
    """Every position is taken once, in order, whatever is repeated, late or lost."""

    def __init__(self, sampling: Sampling) -> None:
        self.tokens: list[int] = []
        self.finish: FinishReason | None = None
        self._max_tokens = sampling.max_tokens
        self._logprobs = sampling.logprobs is not None

    def accept(self, event: TokenEvent) -> tuple[Token, ...]:
        """The tokens of the event that are new.

        Raises TransferFailed when positions before it, or log probabilities of it, are missing:
        they were lost on the way, and only another attempt can tell what they were.
        """
        here = len(self.tokens)
        if event.index > here:
            raise TransferFailed(
                f"output tokens {here} to {event.index - 1} never arrived; recompute from {here}",
                stage=Stage.DECODE,
            )
        end = event.index + len(event.token_ids)
        if self.finish is not None or end < here:
            return ()
        fresh = self._told(event)[here - event.index :]
        self.tokens += (token.id for token in fresh)
        self.finish = event.finish
        if self.finish is None and len(self.tokens) >= self._max_tokens:
            self.finish = FinishReason.LENGTH
        return fresh

    def _told(self, event: TokenEvent) -> tuple[Token, ...]:
        if not self._logprobs:
            return tuple(map(Token, event.token_ids))
        if len(event.logprobs) != len(event.token_ids):
            raise TransferFailed(
                f"output token {event.index} came without its log probabilities; recompute it",
                stage=Stage.DECODE,
            )
        return tuple(map(Token, event.token_ids, event.logprobs))
