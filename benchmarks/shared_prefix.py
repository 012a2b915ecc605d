"""Attention over a shared prefix, once for the group against once for each sequence.

    python -m benchmarks.shared_prefix                the shape of SmolLM2, both ways interleaved
    python -m benchmarks.shared_prefix --cpu-time     one thread, in seconds of the process

One layer of one decode step, ms.  saved: positions that need not be read again, which
`engine.model.prefix_groups.WORTH_TOKENS` is about.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from cluster.machine import usable_cores
from core.ids import BlockId
from core.kvlayout import KVLayout
from core.spec import ModelSpec
from engine.device.choice import best_backend
from engine.device.pool import KVPool
from engine.model import refs
from engine.model.attention import Attention, Span, StepContext
from engine.model.config import ModelConfig
from engine.model.config_file import load_config
from engine.model.prefix_groups import prefix_groups
from engine.model.shared_prefix import SharedPrefixAttention

LAYERS, BLOCK, OWN, CALLS = 2, 16, 100, 25
SIZES = [
    *((4, n) for n in (1024, 2048, 4096)),
    *((8, n) for n in (512, 1024, 2048)),
    *((32, n) for n in (256, 512, 1024, 2048)),
]


def main() -> None:
    args = _parse()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.cpu_time else time.perf_counter
    config = replace(load_config(refs.resolve(ModelSpec().ref)), layers=LAYERS)
    print("| sequences | shared tokens | saved | each | shared | ratio |\n" + "|--:" * 6 + "|")
    with torch.inference_mode():
        for sequences, shared in SIZES:
            each, once = _compare(config, sequences, shared, clock)
            row = f"| {sequences} | {shared} | {(sequences - 1) * shared} "
            print(f"{row}| {each:.2f} | {once:.2f} | {each / once:.2f} |", flush=True)


def _compare(
    config: ModelConfig, sequences: int, shared: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """ms, the median of each."""
    pool, context = _step(config, sequences, shared)
    backend = best_backend(torch.float32)

    def usual(part: StepContext) -> Attention:
        return backend.attention(config, pool, part)

    tables = [span.block_ids[: span.start // BLOCK] for span in context.spans]
    groups = prefix_groups(tables, BLOCK, worth=1)
    ways = (usual(context), SharedPrefixAttention(pool.kv, context, groups, config, usual))
    inputs = [
        torch.randn(sequences, heads, config.head_dim)
        for heads in (config.heads, config.kv_heads, config.kv_heads)
    ]
    times = [[_call(way, inputs, clock) for way in ways] for _ in range(CALLS)]
    each, once = zip(*times, strict=True)
    return median(each), median(once)


def _call(way: Attention, inputs: list[Tensor], clock: Callable[[], float]) -> float:
    began = clock()
    for layer in range(LAYERS):
        way(layer, *inputs)
    return 1e3 * (clock() - began) / LAYERS


def _step(config: ModelConfig, sequences: int, shared: int) -> tuple[KVPool, StepContext]:
    """Every sequence has OWN tokens after the shared ones, and computes the next."""
    common, own = shared // BLOCK, -(-(OWN + 1) // BLOCK)
    spans = []
    for i in range(sequences):
        first = common + i * own
        table = (*range(common), *range(first, first + own))
        spans.append(Span(i, 1, shared + OWN, tuple(map(BlockId, table))))
    layout = KVLayout(LAYERS, config.kv_heads, BLOCK, config.head_dim, "float32")
    blocks = common + sequences * own
    pool = KVPool(layout, blocks, memoryview(bytearray(blocks * layout.block_bytes)))
    pool.kv.normal_()
    at = shared + OWN
    return pool, StepContext(
        tuple(spans),
        torch.tensor([span.block_ids[at // BLOCK] for span in spans]),
        torch.full((sequences,), at % BLOCK),
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    if args.cpu_time:
        args.threads = 1
    return args


if __name__ == "__main__":
    main()
