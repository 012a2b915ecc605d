"""`engine.model.ops.Ops` by the kernels of this folder: float32 activations and sums, weights as
they are stored."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.config import Activation
from engine.model.ops import Rotation
from engine.model.weight import Weight, dense
from engine.native.library import ACTIVATIONS, Library, Matrix
from engine.native.pack import Packed, pack


class NativeLinear:
    """Immutable, so any thread may call it."""

    def __init__(
        self, library: Library, parts: Sequence[Packed], bias: Tensor | None, threads: int
    ) -> None:
        self._library = library
        self._parts = parts
        self._matrices = (Matrix * len(parts))(*(part.matrix for part in parts))
        self._bias = bias
        self._threads = threads
        self._outputs = sum(part.matrix.outputs for part in parts)
        self._depth = parts[0].matrix.depth

    def __call__(self, x: Tensor) -> Tensor:
        x = _strided(x)
        rows, width = x.shape
        if width < self._depth:
            x = F.pad(x, (0, self._depth - width))
        out = x.new_empty(rows, self._outputs)
        self._library.linear(
            self._matrices,
            len(self._parts),
            x.data_ptr(),
            x.stride(0),
            rows,
            out.data_ptr(),
            self._outputs,
            None if self._bias is None else self._bias.data_ptr(),
            self._threads,
        )
        return out


class NativeExperts:
    """Immutable, so any thread may call it."""

    def __init__(
        self,
        library: Library,
        gate_up: Sequence[Packed],
        down: Sequence[Packed],
        activation: Activation,
        threads: int,
    ) -> None:
        self._library = library
        self._packed = (gate_up, down)
        self._gate_up, self._down = (
            (Matrix * len(each))(*(one.matrix for one in each)) for each in self._packed
        )
        self._activation = ACTIVATIONS[activation]
        self._threads = threads

    def __call__(self, x: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
        x, share = _strided(x), share.to(torch.float32).contiguous()
        chosen = chosen.contiguous()
        out = torch.empty_like(x)
        self._library.experts(
            self._gate_up,
            self._down,
            len(self._gate_up),
            x.data_ptr(),
            x.stride(0),
            len(x),
            chosen.data_ptr(),
            share.data_ptr(),
            chosen.shape[1],
            self._activation,
            out.data_ptr(),
            self._threads,
        )
        return out


@dataclass(frozen=True, slots=True)
class NativeOps:
    """threads: those of torch, which the kernels use too."""

    library: Library
    threads: int
    dtype: torch.dtype = torch.float32

    def linear(self, parts: Sequence[Weight], bias: Tensor | None = None) -> NativeLinear:
        packed = [pack(part, self.library) for part in parts]
        bias = None if bias is None else bias.float().contiguous()
        return NativeLinear(self.library, packed, bias, self.threads)

    def experts(
        self, gate_up: Sequence[Weight], down: Sequence[Weight], activation: Activation
    ) -> NativeExperts:
        first, second = ([pack(w, self.library) for w in each] for each in (gate_up, down))
        return NativeExperts(self.library, first, second, activation, self.threads)

    def embed(self, table: Weight, token_ids: Tensor) -> Tensor:
        return dense(table[token_ids]).float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        shape, x = x.shape, _strided(x)
        if weight.dtype is not torch.float32:
            weight = weight.float()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.library.rms_norm(*_layout(x), weight.data_ptr(), eps, out.data_ptr(), self.threads)
        return out.view(shape)

    def rotate(self, x: Tensor, by: Rotation) -> Tensor:
        """In place, if x is float32 and a head is contiguous."""
        x, cos, sin = _strided(x), by.cos.contiguous(), by.sin.contiguous()
        self.library.rotate(*_layout(x), cos.data_ptr(), sin.data_ptr(), self.threads)
        return x

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate_up = _strided(gate_up)
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        self.library.gated(
            gate_up.data_ptr(),
            rows,
            gate_up.stride(0),
            width,
            ACTIVATIONS[activation],
            out.data_ptr(),
            self.threads,
        )
        return out


def _strided(x: Tensor) -> Tensor:
    """x as float32 of two or three dimensions, the last of them contiguous; x itself if it is."""
    if x.dtype is not torch.float32:
        x = x.float()
    if x.dim() not in (2, 3):
        x = x.reshape(-1, x.shape[-1])
    return x if x.is_contiguous() or x.stride(-1) == 1 else x.contiguous()


def _layout(x: Tensor) -> tuple[int, ...]:
    """Address; rows and their distance; heads of a row and their distance; length of a head."""
    shape, stride = x.shape, x.stride()
    if len(shape) == 2:
        return x.data_ptr(), shape[0], stride[0], 1, 0, shape[1]
    return x.data_ptr(), shape[0], stride[0], shape[1], stride[1], shape[2]
