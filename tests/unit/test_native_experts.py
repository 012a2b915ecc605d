"""Mixture-of-experts layers by the compiled kernels equal a dense pass through every expert."""

import pytest
import torch
from torch import Tensor

from engine.model.ops import TorchOps
from engine.model.weight import Weight, dense
from engine.native.ops import NativeOps
from tests.unit.native_help import KINDS, LANES, assert_close, library, weight_of

EXPERTS, HIDDEN, WIDTH, CHOICES = 7, 64, 32, 3


def weights(
    kind: str, hidden: int = HIDDEN, width: int = WIDTH
) -> tuple[list[Weight], list[Weight]]:
    first = [weight_of(kind, 2 * width, hidden, seed=e) for e in range(EXPERTS)]
    return first, [weight_of(kind, hidden, width, seed=e + EXPERTS) for e in range(EXPERTS)]


def choices(rows: int) -> tuple[Tensor, Tensor]:
    chosen = torch.stack([torch.randperm(EXPERTS)[:CHOICES] for _ in range(rows)])
    return chosen, torch.rand(rows, CHOICES)


def reference(first: list[Weight], second: list[Weight], x: Tensor, activation: str) -> Tensor:
    """[experts, rows, hidden] float64"""
    ops = TorchOps(torch.float64)
    inner = [ops.gated(x.double() @ dense(w).double().T, activation) for w in first]
    return torch.stack([one @ dense(w).double().T for one, w in zip(inner, second, strict=True)])


def combine(each: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
    rows = torch.arange(len(chosen))[:, None]
    return (each[chosen, rows] * share.double()[..., None]).sum(1)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_every_token_gets_its_shares(kind: str, lanes: int, rows: int) -> None:
    first, second = weights(kind)
    x, (chosen, share) = torch.randn(rows, HIDDEN), choices(rows)
    experts = NativeOps(library(lanes), threads=1).experts(first, second, "silu")
    each = reference(first, second, x, "silu")
    assert_close(experts(x, chosen, share), combine(each, chosen, share), 4 * each.abs().max())


def test_sizes_that_fill_no_vector_and_another_activation() -> None:
    first, second = weights("float32", hidden=21, width=13)
    x, (chosen, share) = torch.randn(11, 21), choices(11)
    experts = NativeOps(library(), threads=1).experts(first, second, "gelu_tanh")
    each = reference(first, second, x, "gelu_tanh")
    assert_close(experts(x, chosen, share), combine(each, chosen, share), 4 * each.abs().max())


def test_a_token_does_not_depend_on_its_batch() -> None:
    experts = NativeOps(library(), threads=2).experts(*weights("codes4"), "silu")
    x, (chosen, share) = torch.randn(40, HIDDEN), choices(40)
    together = experts(x, chosen, share)
    for i in range(40):
        row = slice(i, i + 1)
        assert torch.equal(experts(x[row], chosen[row], share[row])[0], together[i])


def test_all_tokens_may_choose_the_same_experts() -> None:
    first, second = weights("bfloat16")
    x, chosen = torch.randn(30, HIDDEN), torch.tensor([[6, 0, 3]]).expand(30, 3)
    share = torch.rand(3, 30).T
    experts = NativeOps(library(), threads=2).experts(first, second, "silu")
    each = reference(first, second, x, "silu")
    assert_close(experts(x, chosen, share), combine(each, chosen, share), 4 * each.abs().max())
