"""The weights of one rank: rows of what widens, columns of what narrows, the rest whole.

q, k, v, gate, up, lm_head    rows (outputs): a rank's own heads, neurons, words
o, down                       columns (inputs): partial sums that all ranks add up
embedding, norms, routers     whole, on every rank
"""

from math import gcd

from torch import Tensor

from engine.model.build import Weights
from engine.model.weight import Quantised, Weight, stack
from engine.parallel.split import part

_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
_COLUMNS = ("o_proj", "down_proj")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SMALLEST_GROUP = 16


def shard_weights(weights: Weights, rank: int, size: int) -> Weights:
    """Of all weights of a model, by Hugging Face name, those of one rank.  Empties `weights`.

    A tied head becomes one of its own.  Biases of matrices split by columns are rank 0's alone,
    or they would be added `size` times.
    """
    weights.setdefault(_HEAD, weights[_EMBEDDING])
    own: Weights = {}
    for name in list(weights):
        weight = weights.pop(name)
        module, kind = name.split(".")[-2:]
        if module in _ROWS:
            own[name] = _rows(weight, rank, size)
        elif module == "gate_up_proj":
            half = weight.shape[0] // 2
            halves = (weight[:half], weight[half:])
            own[name] = stack([_rows(each, rank, size) for each in halves])
        elif module not in _COLUMNS:
            own[name] = weight
        elif kind == "weight":
            own[name] = columns(weight, part(weight.shape[1], rank, size))
        elif rank == 0:
            own[name] = weight
    return own


def columns(weight: Weight, which: slice) -> Weight:
    """These inputs of a matrix; a copy, so that the whole can go.

    Where a cut goes through columns that share a scale, the groups get smaller; a matrix whose
    groups would be no multiple of 16 is expanded.
    """
    if isinstance(weight, Tensor):
        return weight[:, which].contiguous()
    group = gcd(weight.group, which.start, which.stop)
    if group % _SMALLEST_GROUP:
        return weight.dense()[:, which].contiguous()

    def cut(each: Tensor, start: int, stop: int) -> Tensor:
        return each[:, start:stop].contiguous()

    def of_groups(each: Tensor) -> Tensor:
        finer = each.repeat_interleave(weight.group // group, dim=1)
        return cut(finer, which.start // group, which.stop // group)

    return Quantised(
        cut(weight.codes, which.start * weight.bits // 8, which.stop * weight.bits // 8),
        of_groups(weight.scales),
        None if weight.mins is None else of_groups(weight.mins),
        weight.bits,
        group,
    )


def _rows(weight: Weight, rank: int, size: int) -> Weight:
    """A rank's outputs of a matrix or a bias; a copy, so that the whole can go."""
    return stack([weight[part(weight.shape[0], rank, size)]])
