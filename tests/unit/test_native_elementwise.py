"""Norms, rotary embeddings, gates and embeddings by the compiled kernels."""

import pytest
import torch

from engine.model.ops import Rotation, TorchOps
from engine.native.ops import NativeOps
from tests.unit.native_help import KINDS, LANES, assert_close, library, weight_of

EXACT = TorchOps(torch.float64)


def ops(lanes: int = 0, threads: int = 1) -> NativeOps:
    return NativeOps(library(lanes), threads)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("width", [1, 7, 64, 576, 1000])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_norms(rows: int, width: int, lanes: int) -> None:
    x, weight = torch.randn(rows, width) * 3, torch.randn(width)
    want = EXACT.rms_norm(x.double(), weight.double(), 1e-5)
    assert_close(ops(lanes).rms_norm(x, weight, 1e-5), want)


def test_norms_of_heads_inside_a_wider_row() -> None:
    qkv, weight = torch.randn(5, 9, 48), torch.randn(48, dtype=torch.bfloat16)
    view = qkv[:, 2:6]
    got = ops().rms_norm(view, weight, 1e-6)
    assert_close(got, EXACT.rms_norm(view.double(), weight.double(), 1e-6))
    assert got.is_contiguous()


def test_norms_of_any_number_of_dimensions() -> None:
    x, weight = torch.randn(2, 3, 4, 20), torch.randn(20)
    want = EXACT.rms_norm(x.double(), weight.double(), 1e-6)
    assert_close(ops().rms_norm(x, weight, 1e-6), want)
    assert_close(ops().rms_norm(x[0, 0, 0], weight, 1e-6), want[0, 0, 0])


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("head_dim", [2, 16, 64, 80])
@pytest.mark.parametrize("rows", [1, 70])
def test_rotation_of_heads_inside_a_wider_row(rows: int, head_dim: int, lanes: int) -> None:
    qkv = torch.randn(rows, 6, head_dim)
    view, before = qkv[:, 1:5], qkv.clone()
    by = Rotation(torch.randn(rows, 1, head_dim), torch.randn(rows, 1, head_dim))
    want = EXACT.rotate(view.double(), Rotation(by.cos.double(), by.sin.double()))
    assert_close(ops(lanes).rotate(view, by), want, magnitude=20.0)
    assert torch.equal(qkv[:, 0], before[:, 0])
    assert torch.equal(qkv[:, 5], before[:, 5])


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 64), (33, 1536)])
def test_gates(rows: int, width: int, activation: str, lanes: int) -> None:
    x = torch.randn(rows, 2 * width) * 4
    want = EXACT.gated(x.double(), activation)
    assert_close(ops(lanes).gated(x, activation), want)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_of_every_size(activation: str, lanes: int) -> None:
    gate = torch.cat((torch.linspace(-110, 110, 9001), torch.tensor([-0.0, 1e-30, -1e4, 1e4])))
    x = torch.cat((gate, torch.ones_like(gate)))[None]
    want = EXACT.gated(x.double(), activation)
    assert_close(ops(lanes).gated(x, activation), want, magnitude=1e-6)


def test_threads_share_the_rows() -> None:
    x, weight, gate_up = torch.randn(300, 500), torch.randn(500), torch.randn(300, 500)
    by = Rotation(torch.randn(300, 1, 100), torch.randn(300, 1, 100))
    alone, shared = ops(threads=1), ops(threads=2)
    assert torch.equal(shared.rms_norm(x, weight, 1e-6), alone.rms_norm(x, weight, 1e-6))
    assert torch.equal(shared.gated(gate_up, "silu"), alone.gated(gate_up, "silu"))
    one, other = x.view(300, 5, 100), x.clone().view(300, 5, 100)
    assert torch.equal(shared.rotate(one, by), alone.rotate(other, by))


def test_gates_hide_no_nan() -> None:
    x = torch.full((1, 32), float("nan"))
    assert bool(ops().gated(x, "silu").isnan().all())


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings(kind: str) -> None:
    table, ids = weight_of(kind, 50, 64), torch.tensor([3, 0, 49, 3])
    got = ops().embed(table, ids)
    assert got.dtype == torch.float32
    assert torch.equal(got, TorchOps(torch.float32).embed(table, ids))
