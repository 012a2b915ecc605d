"""Prepacking (Zhao et al. 2024, arXiv:2404.09529) as the filler of a Sarathi step.

    step 1  │d d│ prompt 1 ...... │ prompt 4 .. │      prompt 2 would not fit whole
    step 2  │d d│ prompt 2 .......... │ prompt 3 │

The paper bin-packs prompts into rows of a padded batch.  Our attention has no padding, so what is
packed are steps: short prompts are not split but put together so that few steps hold them all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from engine.policy.policies.port import Load, Share


@dataclass(frozen=True, slots=True)
class Prepack:
    """budget: tokens in a step, decodes included; one prompt token is always allowed."""

    stalls_decodes: ClassVar[bool] = False
    budget: int

    def compose(self, load: Load) -> tuple[Share, ...]:
        """The bin that the oldest prompt is in; a prompt too long for a bin gets chunks."""
        if not load.prompts:
            return ()
        room = max(1, self.budget - load.decodes)
        if load.prompts[0].tokens >= room:
            return (Share(0, room),)
        short = {i: p.tokens for i, p in enumerate(load.prompts) if p.tokens <= room}
        bins = first_fit_decreasing(list(short.values()), room)
        packed = next(b for b in bins if 0 in b)
        indices = list(short)
        return tuple(Share(indices[i], load.prompts[indices[i]].tokens) for i in sorted(packed))


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `sizes`, each at most `capacity`, in bins: the largest first, each into the first
    bin with room for it (Johnson 1973: at most 11/9 of the fewest possible, plus one)."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = next((b for b, room in enumerate(rooms) if sizes[i] <= room), len(bins))
        if at == len(bins):
            bins.append([])
            rooms.append(capacity)
        bins[at].append(i)
        rooms[at] -= sizes[i]
    return bins
