"""Matrix products by the compiled kernels equal dense float32 mathematics."""

import pytest
import torch
from torch import Tensor

from engine.model.ops import Linear
from engine.model.weight import Quantised, Weight, dense
from engine.native.ops import NativeOps
from tests.unit.native_help import KINDS, LANES, assert_close, library, weight_of

ROWS = (1, 2, 3, 4, 5, 6, 7, 13, 32, 70)
SHAPES = ((1, 32), (15, 96), (17, 64), (40, 1056), (100, 2080))
"""Outputs that fill no panel, one, and parts of several; depths of less and more than a block."""


def check(
    linear: Linear,
    parts: list[Weight],
    x: Tensor,
    bias: Tensor | None = None,
    counts: tuple[int, ...] = (),
) -> None:
    """x as it is, and the first so many rows of it."""
    matrix = torch.cat([dense(part).double() for part in parts])
    want, magnitude = x.double() @ matrix.T, x.double().abs() @ matrix.abs().T
    if bias is not None:
        want += bias.double()
    for rows in (*counts, len(x)):
        assert_close(linear(x[:rows]), want[:rows], magnitude[:rows])


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_rows_of_any_shape(kind: str, lanes: int) -> None:
    ops = NativeOps(library(lanes), threads=1)
    for outputs, depth in SHAPES:
        weight = weight_of(kind, outputs, depth)
        check(ops.linear([weight]), [weight], torch.randn(97, depth), counts=ROWS)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "codes8 whole rows"])
def test_a_depth_that_is_no_multiple_of_anything(kind: str) -> None:
    weight = weight_of(kind, 21, 37)
    check(NativeOps(library(), threads=1).linear([weight]), [weight], torch.randn(9, 37))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_batch_or_on_the_threads(kind: str) -> None:
    weight, x = weight_of(kind, 50, 1120), torch.randn(200, 1120)
    together = NativeOps(library(), threads=2).linear([weight])(x)
    alone = NativeOps(library(), threads=1).linear([weight])
    for rows in (1, 2, 4, 5, 7, 64):
        assert torch.equal(alone(x[100 : 100 + rows]), together[100 : 100 + rows])


def test_parts_of_different_kinds_and_a_bias() -> None:
    parts = [weight_of(kind, 18 + i, 64) for i, kind in enumerate(KINDS)]
    bias = torch.randn(sum(part.shape[0] for part in parts))
    linear = NativeOps(library(), threads=2).linear(parts, bias)
    check(linear, parts, torch.randn(33, 64), bias, counts=(1, 6))


def test_rows_and_parts_may_be_views_of_bigger_tensors() -> None:
    ops, whole = NativeOps(library(), threads=2), torch.randn(64, 96)
    shard = whole[:, 32:64]
    check(ops.linear([shard]), [shard], torch.randn(5, 40)[:, 8:])
    check(ops.linear([shard[10:30]]), [shard[10:30]], torch.randn(32, 5).T)
    codes = weight_of("codes4 with mins", 64, 96)[10:30]
    check(ops.linear([codes]), [codes], torch.randn(5, 96))


def test_groups_that_no_word_holds_are_expanded() -> None:
    scales = torch.rand(9, 12)
    codes = torch.randint(-128, 128, (9, 48), dtype=torch.int8)
    weight = Quantised(codes, scales, None, 8, 4)
    check(NativeOps(library(), threads=1).linear([weight]), [weight], torch.randn(3, 48))


def test_extreme_codes_come_through_exactly() -> None:
    """The sum of one product is that product, so nothing may be rounded."""
    codes = torch.arange(-128, 128, dtype=torch.int8).repeat(2, 1).T.contiguous()
    weight = Quantised(torch.nn.functional.pad(codes, (0, 30)), torch.ones(256, 1), None, 8, 32)
    out = NativeOps(library(), threads=1).linear([weight])(torch.eye(1, 32))
    assert out.tolist() == [list(range(-128, 128))]
    nibbles = torch.arange(16, dtype=torch.uint8)[:, None] * 17
    weight = Quantised(nibbles.expand(16, 16).contiguous(), torch.ones(16, 1), None, 4, 32)
    out = NativeOps(library(), threads=1).linear([weight])(torch.eye(32))
    assert out.tolist() == [list(range(16))] * 32
