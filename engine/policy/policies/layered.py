"""Layered prefill ("From Tokens to Layers", Lee et al. 2025, arXiv:2510.08055).

    layers    │d d d d                  │d d d d                  │d d d d
    0 … 9     │d d d d│ prompt ....... ││d d d d                  │d d d d
    10 … 19   │d d d d                  │d d d d│ prompt ....... ││d d d d
    20 … 29   │d d d d                  │d d d d                  │d d d d│ prompt ....... │
              └ step 1                  └ step 2                  └ step 3

A prompt is not cut into chunks of tokens that pass all layers but passes a group of layers per
step with all its tokens, while decodes pass all.  The weights of a layer, of every expert above
all, are then read once per prompt and not once per chunk.
"""

from dataclasses import dataclass
from typing import ClassVar

from engine.policy.plan import LayerGroup
from engine.policy.policies.port import Load, Share


@dataclass(frozen=True, slots=True)
class Layered:
    """budget: tokens in a step as Sarathi has them, in tokens times layers: what bounds the gap
    between two decodes is the same.  layers: of the model.

    A prompt longer than fits the budget with one layer a step is cut into chunks that do.
    """

    stalls_decodes: ClassVar[bool] = False
    budget: int
    layers: int

    def compose(self, load: Load) -> tuple[Share, ...]:
        """First the prompt between two layers, of which there is one at most; it always gets
        on by one layer.  The one that cannot pass the rest of the layers ends the step."""
        room = max(1, self.budget - load.decodes) * self.layers
        shares: list[Share] = []
        for i in sorted(range(len(load.prompts)), key=lambda i: not load.prompts[i].passing):
            prompt = load.prompts[i]
            tokens = prompt.passing or min(prompt.tokens, self.budget * self.layers)
            depth = min(self.layers - prompt.layers, room // tokens)
            if not depth and shares:
                break
            group = LayerGroup(prompt.layers, prompt.layers + max(1, depth), self.layers)
            shares.append(Share(i, tokens, group))
            if not group.is_last:
                break
            room -= tokens * depth
        return tuple(shares)
