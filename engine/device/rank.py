"""Tokens in order of their logits: (logit falling, id rising), a total order.

`torch.topk` alone leaves it open which of two equal logits comes first, so that a row's tokens
could depend on the device or on the batch around it.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

_GROUP = 64


def best(logits: Tensor, width: int) -> Tensor:
    """logits [S, vocab] float32 -> [S, width] int64: the ids of the best tokens, best first.

    Of groups of 64 neighbours only the `width` best, by their best member, can have one of the
    `width` best tokens: each group before has a token before.  So few tokens are looked at twice.
    """
    rows, vocab = logits.shape
    if width * _GROUP >= vocab:
        return _first(logits, width)
    groups = pad(logits, (0, -vocab % _GROUP), value=float("-inf")).view(rows, -1, _GROUP)
    near = _first(groups.amax(-1), width).sort(-1).values[:, :, None]
    ids = (near * _GROUP + torch.arange(_GROUP, device=logits.device)).flatten(1)
    found = groups.gather(1, near.expand(-1, -1, _GROUP)).flatten(1)
    return ids.gather(-1, _first(found, width))


def _first(values: Tensor, width: int) -> Tensor:
    """[S, N] float32 -> [S, width]: places of the largest, of equal ones the first.

    Sorts integers that are all different in a row: a float's bits read as an integer of the same
    order, which needs the negative ones flipped and -0.0 made 0.0, and then the place.
    """
    bits = (values + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    count = values.shape[-1]
    keys = (ordered << 32) | torch.arange(count - 1, -1, -1, device=values.device)
    return count - 1 - (keys.topk(width).values & 0xFFFFFFFF)
