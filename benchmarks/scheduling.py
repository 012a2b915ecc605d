"""The step policies side by side, on one engine without a cluster, under the same arrivals.

    python -m benchmarks.scheduling                  SmolLM2, chats with a long prompt now and then
    python -m benchmarks.scheduling --moe            a mixture of experts with random weights
    python -m benchmarks.scheduling --trace FILE     the first requests of an Azure trace (CSV)

Every round runs all policies in turn on the same requests, in another order each time.  Figures
are over all rounds; in brackets the ratio to sarathi.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from actors.boot import WorkerBoot
from actors.loaded import load, scheduler_config
from benchmarks import arrivals, random_moe
from benchmarks.open_loop import Figures, OpenLoop
from cluster.machine import usable_cores
from core.ids import Epoch, WorkerId
from core.messages import Role
from core.spec import BatchSpec, ClusterSpec, KVSpec, ModelSpec, TimeoutSpec
from engine.policy.config import SchedulerConfig
from engine.policy.policies.choose import POLICIES

BASE = "sarathi"
VOCAB = 40_000
TRACE_LONGEST = 1600


def main() -> None:
    args = _parse()
    with ExitStack() as stack:
        ref = ModelSpec().ref
        if args.moe:
            ref = str(random_moe.write(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        loop, rules = _engine(ref, args.chunk, args.threads, args.cpu_time)
        loop.run(rules, arrivals.mixed(-1, 4, args.rate, rules.vocab_size), Figures())
        figures = {name: Figures() for name in args.policies}
        for turn in range(args.rounds):
            requests = _requests(args, seed=turn, vocab=min(VOCAB, rules.vocab_size))
            for name in _rotated(args.policies, turn):
                loop.run(replace(rules, policy=name), requests, figures[name])
            print(f"round {turn + 1} of {args.rounds} done", flush=True)
    _print_table(figures)


def _engine(ref: str, chunk: int, threads: int, cpu_time: bool) -> tuple[OpenLoop, SchedulerConfig]:
    torch.set_num_threads(threads)
    spec = ClusterSpec(
        model=ModelSpec(ref=ref, dtype="float32"),
        kv=KVSpec(memory_mb=1024),
        batch=BatchSpec(chunk_tokens=chunk, max_queued_tokens=1 << 30),
        timeouts=TimeoutSpec(lease_s=1e9),
    )
    boot = WorkerBoot(WorkerId("bare"), Role.HYBRID, Epoch(1), spec, threads)
    model = load(boot, lambda phase: None)
    clock = time.process_time if cpu_time else time.perf_counter
    return OpenLoop(model, clock), scheduler_config(boot, model, address="")


def _requests(args: argparse.Namespace, seed: int, vocab: int) -> list[arrivals.Arrival]:
    if args.trace:
        return arrivals.from_trace(args.trace, args.requests, args.rate, TRACE_LONGEST, vocab)
    return arrivals.mixed(seed, args.requests, args.rate, vocab)


def _rotated(names: Sequence[str], turn: int) -> list[str]:
    at = turn % len(names)
    return [*names[at:], *names[:at]]


def _print_table(figures: dict[str, Figures]) -> None:
    heads = ("TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "TPOT p99 ms", "longest gap ms", "tok/s")
    print("\n| policy | " + " | ".join(heads) + " |\n|---" + "|--:" * len(heads) + "|")
    base = figures[BASE].row()
    for name, of_policy in figures.items():
        cells = (
            f"{value:.0f} ({value / reference:.2f})"
            for value, reference in zip(of_policy.row(), base, strict=True)
        )
        print(f"| {name} | " + " | ".join(cells) + " |")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=12, help="in a round")
    parser.add_argument("--rate", type=float, default=1.5, help="requests a second")
    parser.add_argument("--chunk", type=int, default=128, help="batch.chunk_tokens")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="one thread, in seconds of the process: for a busy machine",
    )
    parser.add_argument("--moe", action="store_true")
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    if args.cpu_time:
        args.threads = 1
    if BASE not in args.policies:
        parser.error(f"--policies needs {BASE}, which the others are compared with")
    return args


if __name__ == "__main__":
    main()
