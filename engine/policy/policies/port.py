"""The question of every step, which prompt tokens join it, and what may be answered.

A policy sees counts of tokens, never sequences or blocks.  Whether a prompt finds the blocks to
start is the prefill scheduler's business: it asks again without those that do not.
"""

from typing import NamedTuple, Protocol

from engine.policy.plan import LayerGroup


class Prompt(NamedTuple):
    """A prompt that may join the step.

    tokens: whose KV is neither computed nor cached, at least 1.
    passing: how many of them, if any, have passed the first `layers` layers and not the rest.
    """

    tokens: int
    passing: int = 0
    layers: int = 0


class Load(NamedTuple):
    """What there is to do.

    decodes: running sequences, one token each.  prompts: oldest first.
    streak: steps in a row that computed prompt tokens.
    """

    decodes: int
    prompts: tuple[Prompt, ...]
    streak: int = 0


class Share(NamedTuple):
    """`tokens` of prompt number `prompt` of the load pass these layers (None: all)."""

    prompt: int
    tokens: int
    layers: LayerGroup | None = None


class StepPolicy(Protocol):
    """Pure: the same load, the same answer."""

    @property
    def stalls_decodes(self) -> bool:
        """Decodes wait while there are shares; else they are in every step."""
        ...

    def compose(self, load: Load) -> tuple[Share, ...]:
        """Each prompt at most once, within its tokens.  Whenever there are prompts the oldest
        gets a share, after a bounded number of steps at the latest: nobody starves."""
        ...
