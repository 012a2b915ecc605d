"""The operations a model is made of, behind one port: plain torch here, faster ones elsewhere.

A model asks its `Ops` once, at load, for its matrices, and then computes with them.  `TorchOps`
follows the order of operations of Hugging Face `transformers`, the oracle in tests, and is what
runs where nothing faster does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.config import Activation
from engine.model.weight import Weight, dense


class Rotation(NamedTuple):
    """cos, sin [T, 1, head_dim] for T positions; the first half of sin has its sign flipped."""

    cos: Tensor
    sin: Tensor


class Linear(Protocol):
    """x [T, in] -> a fresh [T, out] in the dtype of its `Ops`."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Experts(Protocol):
    """The MLPs of a mixture-of-experts layer, each token through its own few.

    x [T, hidden]; chosen [T, k] int64, expert ids; share [T, k], what each contributes.
    Returns a fresh [T, hidden].  Every active expert is computed once over all its tokens.
    """

    def __call__(self, x: Tensor, chosen: Tensor, share: Tensor) -> Tensor: ...


class Ops(Protocol):
    """dtype: what activations are computed in, at least as precise as the weights' type."""

    @property
    def dtype(self) -> torch.dtype: ...

    def linear(self, parts: Sequence[Weight], bias: Tensor | None = None) -> Linear:
        """One matrix of `parts` stacked along its outputs.  Takes the parts over: the caller
        keeps no reference, so that a repacked copy does not double the memory.

        A dense part may be a view of a bigger tensor (the shard of a tensor-parallel rank).
        """
        ...

    def experts(
        self, gate_up: Sequence[Weight], down: Sequence[Weight], activation: Activation
    ) -> Experts:
        """gate_up[e] [2 * intermediate, hidden], gate first; down[e] [hidden, intermediate]."""
        ...

    def embed(self, table: Weight, token_ids: Tensor) -> Tensor:
        """Rows of table [vocab, hidden] in `dtype`: [T, hidden]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last dimension of x [..., n] (which may be a strided view); fresh."""
        ...

    def rotate(self, x: Tensor, by: Rotation) -> Tensor:
        """x [T, heads, head_dim], rotated by pairs (i, i + head_dim / 2), as Hugging Face lays
        them out (RoPE, Su et al., arXiv:2104.09864).  May work in place; use what is returned."""
        ...

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up (Shazeer, arXiv:2002.05202): [T, 2n] -> [T, n]."""
        ...


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """weight [out, in], bias [out]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class TorchExperts:
    """gate_up [experts, 2 * intermediate, hidden]; down [experts, hidden, intermediate]."""

    gate_up: Tensor
    down: Tensor
    activation: Activation
    ops: "TorchOps"

    def __call__(self, x: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        tokens = order // chosen.shape[1]
        sorted_x, scale = x[tokens], share.flatten()[order].to(x.dtype)
        out = torch.empty_like(sorted_x)
        counts = chosen.flatten().bincount(minlength=len(self.gate_up)).tolist()
        first = 0
        for expert, count in enumerate(counts):
            if count:
                rows = slice(first, first + count)
                inner = self.ops.gated(
                    F.linear(sorted_x[rows], self.gate_up[expert]), self.activation
                )
                out[rows] = F.linear(inner, self.down[expert])
                first += count
        return torch.zeros_like(x).index_add_(0, tokens, out * scale[:, None])


class TorchOps:
    """`Ops` in plain torch, on any device; quantised weights are expanded at load."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def linear(self, parts: Sequence[Weight], bias: Tensor | None = None) -> TorchLinear:
        whole = [dense(part).to(self.dtype) for part in parts]
        weight = whole[0] if len(whole) == 1 else torch.cat(whole)
        return TorchLinear(weight, None if bias is None else bias.to(self.dtype))

    def experts(
        self, gate_up: Sequence[Weight], down: Sequence[Weight], activation: Activation
    ) -> TorchExperts:
        first, second = (
            torch.stack([dense(w).to(self.dtype) for w in each]) for each in (gate_up, down)
        )
        return TorchExperts(first, second, activation, self)

    def embed(self, table: Weight, token_ids: Tensor) -> Tensor:
        return dense(table[token_ids]).to(self.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def rotate(self, x: Tensor, by: Rotation) -> Tensor:
        """With the sign in `by.sin`, rolling by half a head is transformers' `rotate_half`."""
        return x * by.cos + x.roll(x.shape[-1] // 2, -1) * by.sin

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        return active.mul_(up)
