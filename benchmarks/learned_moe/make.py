"""From texts to a folder: learn the vocabulary, then the weights; keep what a measurement needs."""

import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from benchmarks.learned_moe import checkpoint, held_out, signatures
from benchmarks.learned_moe.corpus import corpora
from benchmarks.learned_moe.tokens import SNIPPET, learn_tokenizer, stream, windows
from benchmarks.learned_moe.training import Progress, Recipe, train

_SNIPPETS = 200
"""Of each domain, whose mean signature is its centroid."""
_TELL_EVERY = 50


def make(folder: Path, recipe: Recipe) -> None:
    """Raises MissingText when a package that holds training text is not installed."""
    texts = corpora()
    tokenizer = learn_tokenizer({name: corpus.train for name, corpus in texts.items()})
    streams = {name: stream(tokenizer, corpus.train) for name, corpus in texts.items()}
    print("tokens: " + ", ".join(f"{n} {len(s):,}" for n, s in streams.items()), flush=True)
    model = checkpoint.build(recipe.seed)
    train(model, streams, recipe, _Teller(recipe.steps))
    checkpoint.save(model, tokenizer, folder)
    held_out.write(texts, folder)
    signatures.write(_centroids(checkpoint.load_model(folder), streams), folder)


def _centroids(model: Qwen3MoeForCausalLM, streams: Mapping[str, Tensor]) -> signatures.Centroids:
    source = torch.Generator().manual_seed(0)
    texts = {name: windows(s, _SNIPPETS, SNIPPET, source) for name, s in streams.items()}
    return {name: signatures.of(model, t).mean(0).tolist() for name, t in texts.items()}


class _Teller:
    """Prints where the training stands, and how long it will take at its pace so far."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._began = time.monotonic()

    def __call__(self, at: Progress) -> None:
        done = at.step + 1
        if done % _TELL_EVERY and done != self._steps:
            return
        left = (time.monotonic() - self._began) / done * (self._steps - done)
        losses = ", ".join(f"{name} {loss:.2f}" for name, loss in at.losses.items())
        print(
            f"step {done} of {self._steps}: loss {losses}; balance {at.balance:.2f}; "
            f"{left:.0f} s left",
            flush=True,
        )
