"""Sarathi-Serve's stall-free batching (Agrawal et al., OSDI 2024, arXiv:2403.02310).

    budget  │d d d d│ rest of prompt 1 ........ │ start of prompt 2 .. │

Every running sequence decodes in every step; what they leave of the token budget goes to prompts,
in chunks.  So no decode waits longer than for one step of `budget` tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from engine.policy.policies.port import Load, Prompt, Share


@dataclass(frozen=True, slots=True)
class Sarathi:
    """budget: tokens in a step, decodes included; one prompt token is always allowed."""

    stalls_decodes: ClassVar[bool] = False
    budget: int

    def compose(self, load: Load) -> tuple[Share, ...]:
        return first_come(load.prompts, max(1, self.budget - load.decodes))


def first_come(prompts: Sequence[Prompt], room: int) -> tuple[Share, ...]:
    """Each prompt in turn as many tokens as it has, until `room` tokens are dealt."""
    shares: list[Share] = []
    for i, prompt in enumerate(prompts):
        if room <= 0:
            break
        shares.append(Share(i, min(room, prompt.tokens)))
        room -= prompt.tokens
    return tuple(shares)
