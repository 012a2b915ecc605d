"""A grammar's matcher together with the output that it has taken."""

from torch import Tensor

from engine.grammar.matching import Matcher


class Follower:
    """Its state is a function of grammar and output alone: it can be made anew anywhere, for a
    sequence that was preempted, retried or handed over."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._taken: tuple[int, ...] = ()
        self._stuck = False

    def follow(self, output: tuple[int, ...]) -> int:
        """Come to the state after `output`, from whatever it was; how many tokens that took.

        At a token that the grammar does not allow it is stuck.
        """
        kept = _common(self._taken, output)
        self.rollback(len(self._taken) - kept)
        count = kept
        while count < len(output) and not self._matcher.ended and self._matcher.take(output[count]):
            count += 1
        self._taken = output[:count]
        self._stuck = count < len(output)
        return len(output) - kept

    def rollback(self, tokens: int) -> None:
        """Forget the last `tokens` of the output, such as drafts that were not accepted."""
        if tokens:
            self._matcher.rollback(tokens)
            self._taken = self._taken[: len(self._taken) - tokens]
            self._stuck = False

    def fill(self, row: Tensor, ends: Tensor, stops: Tensor) -> None:
        """row, ends, stops: int32 [ceil(vocab / 32)].  row becomes the tokens that may come next:
        `stops` are allowed where the output may be whole, and `ends` alone where nothing is."""
        if not (self._stuck or self._matcher.ended):
            self._matcher.fill(row)
            if self._matcher.complete:
                row |= stops
            if row.any():
                return
        row.copy_(ends)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    if other[: len(one)] == one:
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
