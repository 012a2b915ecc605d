"""What a model has learned, measured on the held-out texts in its folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3MoeForCausalLM

from benchmarks.learned_moe import checkpoint, held_out, signatures, sums
from benchmarks.learned_moe.tokens import snippets, stream
from benchmarks.learned_moe.training import token_losses

_EXAMPLES = 4
"""Problems that stand with their answers before the one to answer."""
_NOT_ASKED = -1


@dataclass(frozen=True, slots=True)
class Report:
    """perplexity, unigram: by domain; unigram: of the best guesser that knows only how often each
    token occurs in these very texts.  right_sums, right_domains: shares of problems answered, of
    snippets nearest to their own domain.  cosines: mean of two snippets' signatures, domain by
    domain.  centroids: see `signatures.Centroids`.
    """

    perplexity: dict[str, float]
    unigram: dict[str, float]
    right_sums: float
    right_domains: float
    cosines: list[list[float]]
    centroids: signatures.Centroids


def measure(folder: Path) -> Report:
    model, tokenizer = checkpoint.load_model(folder), checkpoint.load_tokenizer(folder)
    texts, centroids = held_out.read(folder), signatures.read(folder)
    tokens = {name: snippets(stream(tokenizer, t)) for name, t in texts.items()}
    found = {name: signatures.of(model, t) for name, t in tokens.items()}
    return Report(
        perplexity={name: perplexity(model, t) for name, t in tokens.items()},
        unigram={name: unigram_perplexity(t) for name, t in tokens.items()},
        right_sums=right_sums(model, tokenizer, sums.problems(held_out=True)),
        right_domains=signatures.accuracy(found, centroids),
        cosines=signatures.cosines(found),
        centroids=centroids,
    )


@torch.inference_mode()
def perplexity(model: Qwen3MoeForCausalLM, texts: Tensor) -> float:
    """Each text by itself; texts [texts, length]."""
    return token_losses(model(texts).logits, texts).mean().exp().item()


def unigram_perplexity(texts: Tensor) -> float:
    counts = texts.flatten().bincount()
    share = counts[counts > 0] / counts.sum()
    return (-share * share.log()).sum().exp().item()


@torch.inference_mode()
def right_sums(
    model: Qwen3MoeForCausalLM, tokenizer: Tokenizer, problems: Sequence[sums.Problem]
) -> float:
    """Share of the problems whose answer, with its newline, is the greedy continuation.

    It is when every token of the answer is the best after those before it: one forward over
    questions and answers tells.
    """
    shown, asked = problems[:_EXAMPLES], problems[_EXAMPLES:]
    before = "".join(f"{p.question}{p.answer}\n" for p in shown)
    rows = [_row(tokenizer, before + p.question, f"{p.answer}\n") for p in asked]
    tokens = pad_sequence([row[0] for row in rows], batch_first=True)
    answers = pad_sequence([row[1] for row in rows], batch_first=True, padding_value=_NOT_ASKED)
    best, wanted = model(tokens).logits[:, :-1].argmax(-1), answers[:, 1:]
    right: Tensor = (best == wanted) | (wanted == _NOT_ASKED)
    return right.all(1).float().mean().item()


def _row(tokenizer: Tokenizer, question: str, answer: str) -> tuple[Tensor, Tensor]:
    """Tokens [length] of both, and those of the answer alone, in their places."""
    first, second = (torch.tensor(tokenizer.encode(text).ids) for text in (question, answer))
    return torch.cat([first, second]), torch.cat([torch.full_like(first, _NOT_ASKED), second])
