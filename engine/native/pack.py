"""Weight matrices as the kernels read them: in panels of outputs, depth first, so that every
vector load brings the weights of several outputs at one depth and needs no shuffling.

A 32-bit word holds one float32; or one depth of two outputs in bfloat16; or 4 or 8 consecutive
depths of one output in codes.  Outputs are padded to whole panels and depth to a multiple of 8,
with zeros.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.weight import Quantised, Weight
from engine.native.library import BFLOAT16, CODES4, CODES8, FLOAT32, Library, Matrix

DEPTH_STEP = 8


@dataclass(frozen=True, slots=True)
class Packed:
    """matrix points into `words`, `scales` and `mins`, which it does not keep alive."""

    matrix: Matrix
    words: Tensor
    scales: Tensor | None = None
    mins: Tensor | None = None


def pack(weight: Weight, library: Library) -> Packed:
    """weight [out, in]; dense ones of another type than bfloat16 are kept in float32."""
    if isinstance(weight, Quantised):
        if weight.group % DEPTH_STEP == 0 or weight.group == weight.shape[1]:
            return _pack_codes(weight, library)
        weight = weight.dense()
    outputs, depth = weight.shape
    weight = F.pad(weight, (0, -depth % DEPTH_STEP, 0, -outputs % library.columns))
    depth = weight.shape[1]
    if weight.dtype == torch.bfloat16:
        halves = weight.view(-1, 2, library.lanes, depth)
        words, kind = halves.permute(0, 3, 2, 1).contiguous(), BFLOAT16
    else:
        words, kind = _panels(weight.float(), library), FLOAT32
    return Packed(Matrix(kind, outputs, depth, depth, words.data_ptr(), None, None), words)


def _pack_codes(weight: Quantised, library: Library) -> Packed:
    outputs, depth = weight.shape
    padding = -depth % DEPTH_STEP
    codes = F.pad(weight.codes, (0, padding * weight.bits // 8, 0, -outputs % library.columns))
    words = _panels(codes.contiguous().view(torch.int32), library)
    scales = _per_group(weight.scales, library)
    mins = None if weight.mins is None else _per_group(weight.mins, library)
    matrix = Matrix(
        CODES8 if weight.bits == 8 else CODES4,
        outputs,
        depth + padding,
        weight.group if weight.group < depth else depth + padding,
        words.data_ptr(),
        scales.data_ptr(),
        None if mins is None else mins.data_ptr(),
    )
    return Packed(matrix, words, scales, mins)


def _per_group(values: Tensor, library: Library) -> Tensor:
    return _panels(F.pad(values.float(), (0, 0, 0, -len(values) % library.columns)), library)


def _panels(words: Tensor, library: Library) -> Tensor:
    """[out, n] -> [panels, n, columns]"""
    return words.view(-1, library.columns, words.shape[1]).transpose(1, 2).contiguous()
