"""One weight matrix as it lies in memory: a dense tensor, or integer codes with scales.

A quantised matrix stands for exactly the values `dense` gives; computing with the codes instead
of those values saves memory traffic and changes nothing but the order of summation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Quantised:
    """weight[o, i] = scales[o, i // group] * code[o, i] + mins[o, i // group].

    codes   bits 8: int8 [out, in].  bits 4: uint8 [out, in / 2], codes 0 to 15; byte j of a row
            holds element 2j in its low and element 2j + 1 in its high half.
    scales  [out, in / group] float32
    mins    like scales; None: zero
    """

    codes: Tensor
    scales: Tensor
    mins: Tensor | None
    bits: int
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.codes.shape[1] * 8 // self.bits

    @property
    def nbytes(self) -> int:
        mins = 0 if self.mins is None else self.mins.nbytes
        return self.codes.nbytes + self.scales.nbytes + mins

    def dense(self) -> Tensor:
        """[out, in] float32."""
        out, width = self.shape
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1)
        values = codes.reshape(out, -1, self.group).float() * self.scales[..., None]
        if self.mins is not None:
            values += self.mins[..., None]
        return values.view(out, width)

    def __getitem__(self, rows: slice | Tensor) -> "Quantised":
        """Output rows, as a tensor gives them: views for a slice, copies for indices [n]."""
        mins = None if self.mins is None else self.mins[rows]
        return Quantised(self.codes[rows], self.scales[rows], mins, self.bits, self.group)


Weight: TypeAlias = Tensor | Quantised


def dense(weight: Weight) -> Tensor:
    """[out, in]: the tensor itself, or the values a quantised matrix stands for, float32."""
    return weight if isinstance(weight, Tensor) else weight.dense()


def on_device(weight: Weight, device: torch.device) -> Weight:
    if isinstance(weight, Tensor):
        return weight.to(device)
    mins = None if weight.mins is None else weight.mins.to(device)
    codes, scales = weight.codes.to(device), weight.scales.to(device)
    return Quantised(codes, scales, mins, weight.bits, weight.group)


def stack(parts: Sequence[Weight]) -> Weight:
    """One matrix of the outputs of all parts, in order; dense unless all are quantised alike."""
    codes = [part for part in parts if isinstance(part, Quantised)]
    kinds = {(part.bits, part.group, part.mins is None) for part in codes}
    if len(codes) < len(parts) or len(kinds) > 1:
        return torch.cat([dense(part) for part in parts])
    mins = [part.mins for part in codes if part.mins is not None]
    return Quantised(
        torch.cat([part.codes for part in codes]),
        torch.cat([part.scales for part in codes]),
        torch.cat(mins) if mins else None,
        codes[0].bits,
        codes[0].group,
    )
