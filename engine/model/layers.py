"""The pieces that model families share.  Plain functions over tensors, in the order of operations
of Hugging Face `transformers`, which is the oracle in tests.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [out, in], bias [out]: x [..., in] -> [..., out]."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Rotation(NamedTuple):
    """cos, sin [T, 1, head_dim] for T positions; the first half of sin has its sign flipped."""

    cos: Tensor
    sin: Tensor


def rotation(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """RoPE (Su et al., arXiv:2104.09864) angles of positions [T] int64; computed in float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angles = positions[:, None, None].float() * (1.0 / theta**exponents)
    cos, sin = angles.cos(), angles.sin()
    return Rotation(torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """x [T, heads, head_dim], rotated by pairs (i, i + head_dim / 2) as Hugging Face lays them out.

    With the sign in `by.sin`, rolling by half a head is `rotate_half` without its negation.
    """
    return x * by.cos + x.roll(x.shape[-1] // 2, -1) * by.sin


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer, arXiv:2002.05202): [T, 2 * intermediate] -> [T, intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
