"""The output tokens of one request, put together from events of all its attempts.  Pure."""

from core.errors import Stage, TransferFailed
from core.messages import FinishReason, TokenEvent


class Output:
    """Every position is taken once, in order, whatever is repeated, late or lost."""

    def __init__(self, max_tokens: int) -> None:
        self.tokens: list[int] = []
        self.finish: FinishReason | None = None
        self._max_tokens = max_tokens

    def accept(self, event: TokenEvent) -> tuple[int, ...]:
        """The tokens of the event that are new.

        Raises TransferFailed when positions before it are missing: they were lost on the way,
        and only another attempt can tell what they were.
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
        fresh = event.token_ids[here - event.index :]
        self.tokens += fresh
        self.finish = event.finish
        if self.finish is None and len(self.tokens) >= self._max_tokens:
            self.finish = FinishReason.LENGTH
        return fresh
