"""Rotary position embedding (RoPE, Su et al., arXiv:2104.09864): frequencies and angles."""

import math

import torch
from torch import Tensor

from engine.model.config import Rope
from engine.model.ops import Rotation


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.scaling == "none":
        return plain
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "table":
        return plain / torch.tensor(rope.divisors)
    turns = rope.original_len * plain / (2 * math.pi)
    blend = ((turns - rope.low_freq) / (rope.high_freq - rope.low_freq)).clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


def rotation(positions: Tensor, by: Tensor, dtype: torch.dtype) -> Rotation:
    """Angles of positions [T] int64 at frequencies `by` [head_dim / 2], computed in float32."""
    angles = positions[:, None, None].float() * by
    cos, sin = angles.cos(), angles.sin()
    return Rotation(torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))
