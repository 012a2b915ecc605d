"""What the cluster path costs: the same engine through HTTP and called directly.

    python -m benchmarks.edge                     1, 8 and 32 streams, three interleaved rounds
    python -m benchmarks.edge --streams 4 --rounds 5

Three subjects in turn, every round: the bare engine in this process, a cluster of one hybrid
worker, a cluster of one prefill and one decode worker.  Ratios are to the bare engine.
"""

import argparse
import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TypeAlias

from benchmarks import http_load
from benchmarks.clusters import Running, cluster
from benchmarks.inprocess import InProcess
from benchmarks.measure import Run, middle
from cluster.machine import usable_cores
from core.spec import ClusterSpec, KVSpec

Subject: TypeAlias = Callable[[Sequence[list[int]], int, int], Run]

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 32
VOCAB = 40_000
BARE = "bare engine"


def main() -> None:
    args = _parse()
    with ExitStack() as stack:
        subjects = dict(_subjects(stack))
        results: dict[tuple[str, int], list[Run]] = defaultdict(list)
        source = random.Random(1)
        for name, run in subjects.items():
            run(_prompts(source, 2), 2, 4)
            print(f"warm: {name}", flush=True)
        for turn in range(args.rounds):
            for streams in args.streams:
                for name, run in subjects.items():
                    prompts = _prompts(source, max(4, 2 * streams))
                    results[name, streams].append(run(prompts, streams, OUTPUT_TOKENS))
            print(f"round {turn + 1} of {args.rounds} done", flush=True)
    _print_table(list(subjects), args.streams, results)


def _subjects(stack: ExitStack) -> Iterator[tuple[str, Subject]]:
    spec = ClusterSpec(kv=KVSpec(memory_mb=1024))
    hybrid = stack.enter_context(cluster("--hybrid", "1", "--kv.memory_mb", "1024"))
    split = stack.enter_context(
        cluster("--prefill", "1", "--decode", "1", "--kv.memory_mb", "1024")
    )
    bare = InProcess(spec, usable_cores())
    stack.callback(bare.stop)
    yield BARE, bare.run
    yield "hybrid over HTTP", _over_http(hybrid)
    yield "1P1D over HTTP", _over_http(split)


def _over_http(running: Running) -> Subject:
    def run(prompts: Sequence[list[int]], streams: int, out: int) -> Run:
        return asyncio.run(http_load.run(running.url, running.model, prompts, streams, out))

    return run


def _prompts(source: random.Random, count: int) -> list[list[int]]:
    """All different from the first token on: no prefix cache helps anybody."""
    return [[source.randrange(VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def _print_table(
    names: Sequence[str], streams: Sequence[int], results: dict[tuple[str, int], list[Run]]
) -> None:
    print(f"\n{PROMPT_TOKENS} tokens in, {OUTPUT_TOKENS} out; medians; (ratio to the bare engine)")
    print(f"{'streams':>7}  {'subject':<18}{'TTFT ms':>16}{'TPOT ms':>16}{'tokens/s':>16}")
    for count in streams:
        bare = middle(results[BARE, count])
        for name in names:
            figures = middle(results[name, count])
            cells = "".join(
                f"{value:9.1f} ({value / base:4.2f})"
                for value, base in zip(figures, bare, strict=True)
            )
            print(f"{count:>7}  {name:<18}{cells}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
