"""Hugging Face `transformers` as the judge: a plain greedy loop on the same file, in float32.

Its answers for the fixed prompts are kept in `.cache/` under a digest of everything they depend
on, so that a second run of the suite on a machine does not compute them again.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from engine.model.digest import model_digest
from engine.model.refs import ModelFiles
from tests.e2e.prompts import Prompt

CACHE = Path(__file__).parents[2] / ".cache" / "reference"


@dataclass(frozen=True)
class Step:
    token: int
    gap: float


def reference(
    files: ModelFiles, prompts: Sequence[Prompt], count: int, say: Callable[[str], None]
) -> list[list[Step]]:
    """`count` greedy steps after each prompt; the end-of-sequence token ends nothing."""
    content = [transformers.__version__, torch.__version__, torch.backends.cpu.get_cpu_capability(),
               model_digest(files), count, [p.tokens for p in prompts]]  # fmt: skip
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]
    kept = CACHE / f"{digest}.json"
    if kept.exists():
        return [[Step(*s) for s in steps] for steps in json.loads(kept.read_text())]
    say(f"transformers computes the reference for {len(prompts)} prompts (once)")
    model = load(files)
    answers = [greedy(model, p.tokens, count) for p in prompts]
    CACHE.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps([[(s.token, s.gap) for s in steps] for steps in answers]))
    return answers


def load(files: ModelFiles) -> Any:
    torch.set_num_threads(2)
    transformers.utils.logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        files.path.parent, gguf_file=files.path.name, dtype=torch.float32, local_files_only=True
    ).eval()


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int], count: int) -> list[Step]:
    """The plain loop: one sequence, transformers' own cache, argmax."""
    steps: list[Step] = []
    cache = transformers.DynamicCache(config=model.config)
    inputs = torch.tensor([prompt])
    for _ in range(count):
        logits = model(inputs, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        token = int(logits.argmax())
        steps.append(Step(token, best - second))
        inputs = torch.tensor([[token]])
    return steps
