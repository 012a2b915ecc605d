"""The feed-forward half of a layer: one gated MLP, or a router and many."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.model.config import Activation
from engine.model.ops import Experts, Linear, Ops


class Mlp(Protocol):
    def __call__(self, x: Tensor, log: Callable[[Tensor], None] | None) -> Tensor:
        """x [T, hidden] -> a fresh [T, hidden].  log hears which experts each token took."""
        ...


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """gate_up: gate and up projections stacked."""

    gate_up: Linear
    down: Linear
    activation: Activation
    ops: Ops

    def __call__(self, x: Tensor, log: Callable[[Tensor], None] | None = None) -> Tensor:
        return self.down(self.ops.gated(self.gate_up(x), self.activation))


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An MLP that every token goes through, scaled by sigmoid(gate(x)) (Qwen2-MoE)."""

    mlp: DenseMlp
    gate: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.mlp(x) * self.gate(x).sigmoid()


@dataclass(frozen=True, slots=True)
class MoeMlp:
    """Each token goes to its top_k experts by router probability (Mixtral, arXiv:2401.04088).

    normalise: the probabilities of the chosen ones are scaled to sum to 1.
    """

    router: Linear
    experts: Experts
    top_k: int
    normalise: bool
    shared: SharedExpert | None = None

    def __call__(self, x: Tensor, log: Callable[[Tensor], None] | None) -> Tensor:
        share, chosen = self.router(x).float().softmax(-1).topk(self.top_k, dim=-1)
        if self.normalise:
            share = share / share.sum(-1, keepdim=True)
        if log is not None:
            log(chosen)
        out = self.experts(x, chosen, share.to(x.dtype))
        return out if self.shared is None else out + self.shared(x)
