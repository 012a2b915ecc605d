"""The compiled CPU kernels beside torch, on the matrices and the attention of SmolLM2-135M.

    python -m benchmarks.kernels                        1, 8, 32 and 512 rows
    python -m benchmarks.kernels --threads 1 --rows 1 8 --rounds 5

A round passes through every matrix of every layer, subject by subject, so that weights come from
memory as in a real step; the fastest pass of all rounds counts.  (The fastest call of each shape
would be one whose matrix happened to lie in a cache.)  The same goes for attention.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.ids import BlockId
from engine.model.attention import Attention, Span, StepContext
from engine.model.ops import Linear, Ops, TorchOps
from engine.model.paged import PagedAttention
from engine.model.weight import Quantised, Weight
from engine.native.attention import NativeAttention
from engine.native.library import Library, open_library
from engine.native.ops import NativeOps

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 30, 9, 3, 64, 16
LAYER_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD_SHAPE = (49152, 576)
FEW_ROWS = 64
"""Up to here the head takes part: more rows are a prefill chunk."""
SLOW = "torch bf16"
"""Emulated where the CPU does not compute in it; a chunk would take minutes."""
STEPS = {"1 x 300": [(299, 1)], "8 x 300": [(299, 1)] * 8, "32 x 300": [(299, 1)] * 32} | {
    "chunk of 512": [(0, 512)]
}


@dataclass(frozen=True, slots=True)
class Subject:
    """matrices: (out, in), in bytes, product."""

    name: str
    matrices: Sequence[tuple[tuple[int, int], int, Linear]]


def main() -> None:
    args = _parse()
    torch.set_num_threads(args.threads)
    library = open_library()
    with torch.inference_mode():
        subjects = [*_subjects(library, args.threads)]
        speed = _read_speed()
        print(f"memory, read by {args.threads} threads: {speed:.1f} GB/s")
        for rows in args.rows:
            _matrices(subjects, rows, args.rounds, speed)
        _attention(library, args.threads, args.rounds)


def _parse() -> argparse.Namespace:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 512])
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def _subjects(library: Library, threads: int) -> list[Subject]:
    native = NativeOps(library, threads)
    kinds: Mapping[str, tuple[Ops, Callable[[int, int], Weight]]] = {
        "torch fp32": (TorchOps(torch.float32), torch.randn),
        SLOW: (TorchOps(torch.bfloat16), torch.randn),
        "native fp32": (native, torch.randn),
        "native bf16": (native, lambda o, i: torch.randn(o, i).bfloat16()),
        "native int8": (native, lambda o, i: _codes(8, o, i)),
        "native 4-bit": (native, lambda o, i: _codes(4, o, i)),
    }
    return [Subject(name, _matrices_of(ops, make)) for name, (ops, make) in kinds.items()]


def _matrices_of(
    ops: Ops, make: Callable[[int, int], Weight]
) -> list[tuple[tuple[int, int], int, Linear]]:
    made = []
    for shape in (*LAYER_SHAPES * LAYERS, HEAD_SHAPE):
        weight = make(*shape)
        size = weight.nbytes
        if isinstance(ops, TorchOps):
            size = shape[0] * shape[1] * ops.dtype.itemsize
        made.append((shape, size, ops.linear([weight])))
    return made


def _codes(bits: int, outputs: int, depth: int) -> Quantised:
    """Groups of 32; with 4 bits, with mins."""
    codes = torch.randint(0, 256, (outputs, depth * bits // 8), dtype=torch.uint8)
    scales = torch.rand(outputs, depth // 32)
    mins = torch.randn(scales.shape) if bits == 4 else None
    return Quantised(codes.view(torch.int8) if bits == 8 else codes, scales, mins, bits, 32)


def _read_speed() -> float:
    """GB/s of summing up 128 MiB."""
    memory = torch.ones(1 << 25)
    return memory.nbytes / min(_timed(memory.sum) for _ in range(40)) / 1e9


def _matrices(subjects: Sequence[Subject], rows: int, rounds: int, speed: float) -> None:
    chunk = rows > FEW_ROWS
    subjects = [s for s in subjects if not (chunk and s.name == SLOW)]
    best = {s.name: float("inf") for s in subjects}
    for _ in range(rounds):
        for subject in subjects:
            matrices = subject.matrices[: -1 if chunk else None]
            taken = sum(
                _timed(linear, torch.randn(rows, width).to(_dtype(linear)))
                for (_, width), _, linear in matrices
            )
            best[subject.name] = min(best[subject.name], taken)
    print(f"\n{rows} rows: the matrices of all layers" + ("" if chunk else " and of the head"))
    print(f"{'':14}{'ms':>8}{'GB/s':>8}{'of read':>9}{'GFLOP/s':>9}{'x torch':>9}")
    reference = 0.0
    for subject in subjects:
        matrices = subject.matrices[: -1 if chunk else None]
        seconds = best[subject.name]
        reference = reference or seconds
        rate = sum(size for _, size, _ in matrices) / seconds / 1e9
        flops = sum(2 * rows * o * i for (o, i), _, _ in matrices) / seconds / 1e9
        print(
            f"{subject.name:14}{1e3 * seconds:8.1f}{rate:8.1f}{rate / speed:9.2f}{flops:9.1f}"
            f"{reference / seconds:9.2f}"
        )


def _dtype(linear: Linear) -> torch.dtype:
    weight = getattr(linear, "weight", None)
    return weight.dtype if isinstance(weight, Tensor) else torch.float32


def _attention(library: Library, threads: int, rounds: int) -> None:
    print("\nattention, all layers, ms")
    print(f"{'':14}{'torch':>9}{'native':>9}{'bf16 KV':>9}{'x torch':>9}")
    windows, scale = (0,) * LAYERS, HEAD_DIM**-0.5
    for name, spans in STEPS.items():
        context = _context(spans)
        pool = _pool(context)
        backends: list[Attention] = [
            PagedAttention(pool, context, windows, scale),
            NativeAttention(library, pool, context, windows, scale, threads),
            NativeAttention(library, pool.bfloat16(), context, windows, scale, threads),
        ]
        rows = sum(span.queries for span in context.spans)
        inputs = [torch.randn(rows, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS)]
        best = [float("inf")] * len(backends)
        for _ in range(rounds):
            for i, backend in enumerate(backends):
                taken = sum(_timed(backend, layer, *inputs) for layer in range(LAYERS))
                best[i] = min(best[i], taken)
        cells = "".join(f"{1e3 * seconds:9.2f}" for seconds in best)
        print(f"{name:14}{cells}{best[0] / best[1]:9.2f}")


def _context(spans: Sequence[tuple[int, int]]) -> StepContext:
    made, row, block = [], 0, 0
    for start, queries in spans:
        blocks = -(-(start + queries) // BLOCK)
        ids = tuple(BlockId(i) for i in range(block, block + blocks))
        made.append(Span(row, queries, start, ids))
        row, block = row + queries, block + blocks
    cells = [(s.block_ids[p // BLOCK], p % BLOCK) for s in made for p in range(s.start, s.end)]
    block_ids, offsets = torch.tensor(cells).T.contiguous()
    return StepContext(tuple(made), block_ids, offsets)


def _pool(context: StepContext) -> Tensor:
    blocks = 1 + max(max(span.block_ids) for span in context.spans)
    return torch.randn(blocks, LAYERS, 2, KV_HEADS, BLOCK, HEAD_DIM)


def _timed(call: Callable[..., object], *arguments: object) -> float:
    began = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
