"""Dynamic SplitFuse (DeepSpeed-FastGen, Holmes et al. 2024, arXiv:2401.08671).

    step 1  │d d│ prompt 1 ............ │
    step 2  │d d│ prompt 1 .. │ prompt 2 │

Every forward pass has the same number of tokens: long prompts are split, short ones fused, decodes
ride along.  When the prompts at hand do not fill whole passes they are spread evenly over as few
as hold them, where Sarathi has full passes and a short last one.
"""

from dataclasses import dataclass
from typing import ClassVar

from engine.policy.policies.port import Load, Share
from engine.policy.policies.sarathi import first_come


@dataclass(frozen=True, slots=True)
class SplitFuse:
    """size: most tokens of a pass, decodes included; one prompt token is always allowed."""

    stalls_decodes: ClassVar[bool] = False
    size: int

    def compose(self, load: Load) -> tuple[Share, ...]:
        room = max(1, self.size - load.decodes)
        pending = sum(prompt.tokens for prompt in load.prompts)
        passes = max(1, -(-pending // room))
        return first_come(load.prompts, -(-pending // passes))
