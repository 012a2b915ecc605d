"""Whole prompts before any decode: vLLM before chunked prefill (Kwon et al., SOSP 2023,
arXiv:2309.06180), the baseline that Sarathi-Serve and FastGen measure against.

    step 1  │ prompt 1 ....................... │ prompt 2 │
    step 2  │d d d d│
"""

from dataclasses import dataclass
from typing import ClassVar

from engine.policy.policies.port import Load, Share


@dataclass(frozen=True, slots=True)
class PrefillFirst:
    """budget: tokens of prompts that share a step; a longer prompt has one to itself.

    patience: running sequences get a step after so many without them, where vLLM would let them
    wait for as long as prompts arrive.
    """

    stalls_decodes: ClassVar[bool] = True
    budget: int
    patience: int = 64

    def compose(self, load: Load) -> tuple[Share, ...]:
        if load.decodes and load.streak >= self.patience:
            return ()
        shares: list[Share] = []
        room = self.budget
        for i, prompt in enumerate(load.prompts):
            if shares and prompt.tokens > room:
                break
            shares.append(Share(i, prompt.tokens))
            room -= prompt.tokens
        return tuple(shares)
