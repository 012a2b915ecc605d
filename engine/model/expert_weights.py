"""One pair of matrices per expert, whatever a file keeps together or apart.

transformers holds the experts of a layer as stacks [experts, …] and saves them one by one; the
hub has either; llama.cpp stacks gates, ups and downs.
"""

import re
from collections.abc import Iterable, Iterator

from torch import Tensor

from engine.model.weight import Weight, stack

_STACK = re.compile(r"(.+\.experts)\.(gate_up|gate|up|down)_proj(?:\.weight)?")
_HALF = re.compile(r"(.+\.experts\.\d+)\.(gate|up)_proj\.weight")


def per_expert(tensors: Iterable[tuple[str, Weight]], experts: int) -> Iterator[tuple[str, Weight]]:
    """Stacks cut apart, then the gate and up projections of an expert joined, gate first.

    A stack is [experts, out, in], or [experts * out, in] if it is quantised.  A half whose other
    half never comes keeps its name.
    """
    halves: dict[tuple[str, str], tuple[str, Weight]] = {}
    for name, weight in _apart(tensors, experts):
        half = _HALF.fullmatch(name)
        if half is None:
            yield name, weight
            continue
        expert = half[1]
        halves[expert, half[2]] = name, weight
        if (expert, "gate") in halves and (expert, "up") in halves:
            parts = [halves.pop((expert, kind))[1] for kind in ("gate", "up")]
            yield f"{expert}.gate_up_proj.weight", stack(parts)
    yield from halves.values()


def _apart(tensors: Iterable[tuple[str, Weight]], experts: int) -> Iterator[tuple[str, Weight]]:
    for name, weight in tensors:
        whole = _STACK.fullmatch(name)
        if whole is None:
            yield name, weight
            continue
        rows = weight.flatten(0, -2) if isinstance(weight, Tensor) else weight
        each = rows.shape[0] // experts
        for expert in range(experts):
            part = rows[expert * each : (expert + 1) * each]
            yield f"{whole[1]}.{expert}.{whole[2]}_proj.weight", part
