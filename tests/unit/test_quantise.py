"""Codes and scales stand for exactly the values of the file; int8 stays within half a step."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.quantise import from_gguf, int8
from engine.model.weight import Quantised, dense, stack

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
HALVES = {  # where the blocks of a type hold their 16-bit floats
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Bytes of a tensor of this type: any bits, but finite floats."""
    kind = gguf.GGMLQuantizationType[name]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    source = np.random.default_rng(seed)
    blocks = source.integers(0, 256, (int(np.prod(shape)) // elements, size), np.uint8)
    for at in HALVES[name]:
        halves = source.standard_normal((len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(-1)


def quantised(name: str, shape: tuple[int, ...], seed: int = 0) -> tuple[Quantised, torch.Tensor]:
    """A random tensor of this type, ours and as the gguf package reads it."""
    raw, kind = random_tensor(name, shape, seed), gguf.GGMLQuantizationType[name]
    ours = from_gguf(raw, int(kind), shape)
    assert ours is not None
    return ours, torch.from_numpy(gguf.dequantize(raw, kind).reshape(-1, shape[-1]))


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_a_gguf_tensor_stands_for_exactly_the_values_of_its_file(name: str, seed: int) -> None:
    ours, theirs = quantised(name, (3, 512), seed)
    assert torch.equal(ours.dense(), theirs)
    assert ours.shape == (3, 512)


@pytest.mark.parametrize("name", KINDS)
def test_a_gguf_tensor_takes_a_fraction_of_its_float32_bytes(name: str) -> None:
    ours, theirs = quantised(name, (64, 512))
    assert ours.nbytes < theirs.nbytes * (0.45 if ours.bits == 8 else 0.26)
    assert ours.codes.is_contiguous()


def test_stacked_experts_become_rows() -> None:
    ours, theirs = quantised("Q4_K", (2, 3, 256))
    assert torch.equal(ours[3:6].dense(), theirs[3:6])


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "IQ4_XS", "TQ1_0", "MXFP4"])
def test_other_types_have_no_codes(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    assert from_gguf(np.zeros(gguf.GGML_QUANT_SIZES[kind][1], np.uint8), int(kind), (1, 1)) is None


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
def test_rows_of_a_quantised_matrix_are_rows_of_its_values(name: str) -> None:
    ours, theirs = quantised(name, (8, 64))
    order = torch.tensor([5, 0, 7, 5])
    assert torch.equal(ours[2:6].dense(), theirs[2:6])
    assert torch.equal(ours[order].dense(), theirs[order])


def test_stacking_keeps_codes_only_of_parts_that_are_alike() -> None:
    (a, a_values), (b, b_values) = quantised("Q4_1", (4, 64), 1), quantised("Q4_1", (2, 64), 2)
    c, c_values = quantised("Q8_0", (3, 64), 3)
    alike, mixed = stack([a, b]), stack([a, c, torch.ones(1, 64)])
    assert isinstance(alike, Quantised)
    assert torch.equal(dense(alike), torch.cat([a_values, b_values]))
    assert isinstance(mixed, torch.Tensor)
    assert torch.equal(mixed, torch.cat([a_values, c_values, torch.ones(1, 64)]))
    assert isinstance(stack([c, c]), Quantised)


@settings(max_examples=50)
@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 70),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e20]),
    seed=st.integers(0, 2**32),
)
def test_int8_is_within_half_a_step_and_keeps_each_channels_peak(
    rows: int, width: int, scale: float, seed: int
) -> None:
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale
    ours = int8(values)
    steps = values.abs().amax(1, keepdim=True) / 127
    assert torch.all((ours.dense() - values).abs() <= steps * 0.5001)
    assert torch.equal(ours.codes.abs().amax(1), torch.full((rows,), 127, dtype=torch.int8))
    assert (ours.bits, ours.group, ours.mins) == (8, width, None)


def test_int8_of_an_empty_channel_is_zero() -> None:
    assert torch.equal(int8(torch.zeros(2, 5)).dense(), torch.zeros(2, 5))
