"""The compiled kernels for tests: of this machine, and built for other vector widths."""

from functools import cache

import pytest
import torch
from torch import Tensor

from engine.model.weight import Quantised, Weight
from engine.native.build import NativeUnavailable, find_compiler
from engine.native.library import Library, open_library

LANES = (0, 4, 16)
"""0: as many as this machine has.  The others stand for SSE, NEON and AVX-512."""
KINDS = ("float32", "bfloat16", "codes8", "codes8 whole rows", "codes4", "codes4 with mins")


def library(lanes: int = 0) -> Library:
    """Compiled at the first use.  Skips the test where there is no compiler; where there is one,
    a failure to compile is a failure."""
    try:
        find_compiler()
    except NativeUnavailable as why:
        pytest.skip(str(why))
    return _open(lanes)


@cache
def _open(lanes: int) -> Library:
    return open_library(extra=(f"-DLANES={lanes}", "-O1") if lanes else ())


def weight_of(kind: str, outputs: int, depth: int, seed: int = 0) -> Weight:
    """Random weights stored as `kind` says.  depth: a multiple of 32 for codes in groups."""
    draw = torch.Generator().manual_seed(seed)
    if not kind.startswith("codes"):
        return torch.randn(outputs, depth, generator=draw).to(getattr(torch, kind))
    bits = int(kind[5])
    group = depth if "whole" in kind else 32
    codes = torch.randint(0, 256, (outputs, depth * bits // 8), generator=draw, dtype=torch.uint8)
    scales = torch.rand(outputs, depth // group, generator=draw) / 2**bits
    mins = torch.randn(scales.shape, generator=draw) if "mins" in kind else None
    return Quantised(codes.view(torch.int8) if bits == 8 else codes, scales, mins, bits, group)


def assert_close(got: Tensor, want: Tensor, magnitude: Tensor | float = 1.0) -> None:
    """Within float32 rounding of sums whose terms' absolute values add up to `magnitude`."""
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    limit = 2e-6 * (torch.as_tensor(magnitude).double() + want.double().abs())
    assert bool(((got.double() - want.double()).abs() <= limit).all())
