"""When a generation is over."""

from dataclasses import dataclass

from core.messages import FinishReason
from core.sampling import Sampling


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends a generation besides its own sampling parameters; max_len in tokens.

    min_tokens is kept where tokens are chosen: an end that comes sooner all the same is the only
    thing that a grammar had left to say, and ends the generation.
    """

    eos_ids: frozenset[int]
    max_len: int

    def finish(
        self, sampling: Sampling, token: int, index: int, length: int
    ) -> FinishReason | None:
        """The verdict on output token number `index`; None: go on.

        length: prompt plus output tokens, this one included.  STOP wins over LENGTH.
        """
        if token in sampling.stop_token_ids:
            return FinishReason.STOP
        if token in self.eos_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        if index + 1 >= sampling.max_tokens or length >= self.max_len:
            return FinishReason.LENGTH
        return None
