"""Matrices as integer codes: those of GGUF files as they are, any other by rounding to int8.

From a GGUF file nothing is rounded: codes and scales stand for exactly the values that
`gguf.dequantize` gives.  Each `_Packing` takes the blocks of one GGML type apart (their structs:
ggml-common.h of llama.cpp); types that fit no `Quantised` have none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.weight import Quantised

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]
Codes: TypeAlias = npt.NDArray[np.uint8] | npt.NDArray[np.int8]
Parts: TypeAlias = tuple[Codes, Floats, Floats | None]
"""Of n blocks: codes [n, elements], scales [n, groups], mins [n, groups]."""

_INT8_MAX = 127


def int8(weight: Tensor) -> Quantised:
    """Symmetric, one scale per output channel (LLM.int8(), arXiv:2208.07339, without its
    activations).  weight: [out, in]; off by half a scale at most.  Lossy."""
    values = weight.float()
    scales = values.abs().amax(dim=1, keepdim=True) / _INT8_MAX
    steps = torch.where(scales > 0, scales, torch.ones_like(scales))
    codes = (values / steps).round_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8)
    return Quantised(codes, scales, None, bits=8, group=values.shape[1])


def from_gguf(raw: Bytes, type_id: int, shape: tuple[int, ...]) -> Quantised | None:
    """raw: a tensor's bytes; shape: [..., in], whose leading dimensions become rows.

    None when the type stays dense: float types, code books, ternaries.
    """
    kind = gguf.GGMLQuantizationType(type_id)
    packing = _PACKINGS.get(kind)
    if packing is None:
        return None
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    codes, scales, mins = packing.parts(raw.reshape(-1, size))
    rows = prod(shape[:-1])
    codes = codes.reshape(rows, -1)
    if packing.bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return Quantised(
        torch.from_numpy(np.ascontiguousarray(codes)),
        torch.from_numpy(scales.reshape(rows, -1)),
        None if mins is None else torch.from_numpy(mins.reshape(rows, -1)),
        packing.bits,
        elements // scales.shape[1],
    )


@dataclass(frozen=True, slots=True)
class _Packing:
    """bits: 4 when all codes are 0 to 15, else 8.  parts: [n, bytes of a block] -> `Parts`."""

    bits: int
    parts: Callable[[Bytes], Parts]


def _half(blocks: Bytes, at: int) -> Floats:
    """[n, 1]: the 16-bit float at this byte."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _fields(packed: Bytes, bits: int, run: int) -> Bytes:
    """[n, bytes] -> [n, bytes * 8 / bits]: per `run` bytes first all lowest fields, then all
    second lowest, …"""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    mask = np.uint8((1 << bits) - 1)
    fields = packed.reshape(len(packed), -1, 1, run) >> shifts & mask
    return fields.reshape(len(packed), -1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """[n, 32]: bit 4 of each code, from the 32 bits at this byte."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> Parts:
    scale = _half(blocks, 0)
    return _fields(blocks[:, 2:], 4, 16), scale, -8 * scale


def _q4_1(blocks: Bytes) -> Parts:
    return _fields(blocks[:, 4:], 4, 16), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Parts:
    codes = _fields(blocks[:, 6:], 4, 16) | _fifth_bits(blocks, 2)
    return codes.view(np.int8) - np.int8(16), _half(blocks, 0), None


def _q5_1(blocks: Bytes) -> Parts:
    codes = _fields(blocks[:, 8:], 4, 16) | _fifth_bits(blocks, 4)
    return codes.view(np.int8), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Parts:
    return blocks[:, 2:].view(np.int8), _half(blocks, 0), None


def _q2_k(blocks: Bytes) -> Parts:
    scales, mins = blocks[:, :16] & 15, blocks[:, :16] >> 4
    return _fields(blocks[:, 16:80], 2, 32), _half(blocks, 80) * scales, -_half(blocks, 82) * mins


def _q3_k(blocks: Bytes) -> Parts:
    """Codes are 4 above their value, so that they fit 4 bits."""
    high = _fields(blocks[:, :32], 1, 32) << 2
    low, top = _fields(blocks[:, 96:104], 4, 8), _fields(blocks[:, 104:108], 2, 4)
    scales = _half(blocks, 108) * ((low | top << 4).astype(np.float32) - 32)
    return _fields(blocks[:, 32:96], 2, 32) | high, scales, -4 * scales


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and mins [n, 8] of Q4_K and Q5_K: 6-bit multiples of the two halves at the head."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.hstack((first & 63, rest & 15 | first >> 2 & 48))
    mins = np.hstack((second & 63, rest >> 4 | second >> 2 & 48))
    return _half(blocks, 0) * scales, -_half(blocks, 2) * mins


def _q4_k(blocks: Bytes) -> Parts:
    return _fields(blocks[:, 16:], 4, 32), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> Parts:
    codes = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    return codes.view(np.int8), *_k_scales(blocks)


def _q6_k(blocks: Bytes) -> Parts:
    codes = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return codes.view(np.int8) - np.int8(32), scales, None


_Type: Any = gguf.GGMLQuantizationType
_PACKINGS: Mapping[Any, _Packing] = {
    _Type.Q4_0: _Packing(4, _q4_0),
    _Type.Q4_1: _Packing(4, _q4_1),
    _Type.Q5_0: _Packing(8, _q5_0),
    _Type.Q5_1: _Packing(8, _q5_1),
    _Type.Q8_0: _Packing(8, _q8_0),
    _Type.Q2_K: _Packing(4, _q2_k),
    _Type.Q3_K: _Packing(4, _q3_k),
    _Type.Q4_K: _Packing(4, _q4_k),
    _Type.Q5_K: _Packing(8, _q5_k),
    _Type.Q6_K: _Packing(8, _q6_k),
}
