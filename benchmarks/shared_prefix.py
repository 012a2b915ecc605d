"""Decodes over a prefix that lies in the pool once, or as often as there are sequences.

    python -m benchmarks.shared_prefix                    the CPU kernels, the shape of SmolLM2
    python -m benchmarks.shared_prefix --backend torch    plain torch
    python -m benchmarks.shared_prefix --cpu-time         one thread, in seconds of the process

One layer of one decode step, ms; both ways interleaved.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count, islice
from statistics import median

import torch
from torch import Tensor

from cluster.machine import usable_cores
from core.ids import BlockId
from core.kvlayout import KVLayout
from core.spec import ModelSpec
from engine.device.backend import Backend, TorchBackend
from engine.device.cpu import NativeBackend
from engine.device.pool import KVPool
from engine.model import refs
from engine.model.attention import Attention, Span, StepContext
from engine.model.config import ModelConfig
from engine.model.config_file import load_config

LAYERS, BLOCK, OWN, CALLS = 2, 16, 100, 25
BACKENDS: dict[str, Callable[[], Backend]] = {
    "native": NativeBackend.open,
    "torch": lambda: TorchBackend.of(torch.float32),
}
SIZES = [
    *((2, n) for n in (1024, 2048)),
    *((8, n) for n in (256, 512, 1024, 2048)),
    *((32, n) for n in (256, 512, 1024, 2048)),
]


def main() -> None:
    args = _parse()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.cpu_time else time.perf_counter
    config = replace(load_config(refs.resolve(ModelSpec().ref)), layers=LAYERS)
    backend = BACKENDS[args.backend]()
    print("| sequences | tokens in common | copies | shared | ratio |\n" + "|--:" * 5 + "|")
    with torch.inference_mode():
        for sequences, common in SIZES:
            copies, shared = _compare(backend, config, sequences, common, clock)
            times = f"{copies:.2f} | {shared:.2f} | {copies / shared:.2f}"
            print(f"| {sequences} | {common} | {times} |", flush=True)


def _compare(
    backend: Backend,
    config: ModelConfig,
    sequences: int,
    common: int,
    clock: Callable[[], float],
) -> tuple[float, float]:
    """ms, the median of each."""
    ways = [
        backend.attention(config, *_step(config, sequences, common, shared))
        for shared in (False, True)
    ]
    inputs = [
        torch.randn(sequences, heads, config.head_dim)
        for heads in (config.heads, config.kv_heads, config.kv_heads)
    ]
    times = [[_call(way, inputs, clock) for way in ways] for _ in range(CALLS)]
    copies, shared = zip(*times, strict=True)
    return median(copies), median(shared)


def _call(way: Attention, inputs: list[Tensor], clock: Callable[[], float]) -> float:
    began = clock()
    for layer in range(LAYERS):
        way(layer, *inputs)
    return 1e3 * (clock() - began) / LAYERS


def _step(
    config: ModelConfig, sequences: int, common: int, shared: bool
) -> tuple[KVPool, StepContext]:
    """Every sequence has OWN tokens after the common ones, and computes the next."""
    at, fresh = common + OWN, count()
    prefix = list(islice(fresh, common // BLOCK))
    spans = []
    for i in range(sequences):
        first = prefix if shared or not i else islice(fresh, len(prefix))
        table = (*first, *islice(fresh, -(-(OWN + 1) // BLOCK)))
        spans.append(Span(i, 1, at, tuple(map(BlockId, table))))
    layout = KVLayout(LAYERS, config.kv_heads, BLOCK, config.head_dim, "float32")
    blocks = next(fresh)
    pool = KVPool(layout, blocks, memoryview(bytearray(blocks * layout.block_bytes)))
    pool.kv.normal_()
    return pool, StepContext(
        tuple(spans),
        torch.tensor([span.block_ids[at // BLOCK] for span in spans]),
        torch.full((sequences,), at % BLOCK),
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=list(BACKENDS), default="native")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    if args.cpu_time:
        args.threads = 1
    return args


if __name__ == "__main__":
    main()
