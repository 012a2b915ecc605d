"""Learning: next-token loss, plus just enough balance that no expert is left idle.

The balance loss is taken over a whole batch, which mixes the domains: it asks that all experts
work, not that they work on every text, and so leaves them free to specialise (Qiu et al.,
arXiv:2501.11873).  It is taken layer by layer; summed over layers, as in `transformers`, it would
let an expert idle in one layer for being busy in another.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3MoeForCausalLM

from benchmarks.learned_moe.tokens import windows


@dataclass(frozen=True, slots=True)
class Recipe:
    """lengths: tokens to a row, taken in turn by the steps; batch: tokens to a step; balance: the
    weight of the balance loss; rate: the highest learning rate, reached after `warmup` steps."""

    steps: int = 2000
    batch: int = 2048
    lengths: tuple[int, ...] = (128, 256, 256, 512)
    balance: float = 0.01
    rate: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """losses: nats per token of each domain in this step; balance: 1.0 is even."""

    step: int
    losses: Mapping[str, float]
    balance: float


def train(
    model: Qwen3MoeForCausalLM,
    streams: Mapping[str, Tensor],
    recipe: Recipe,
    tell: Callable[[Progress], None],
) -> None:
    """Updates `model`.  streams: tokens of each domain, int64 [tokens]."""
    source = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), recipe.rate, (0.9, 0.95), weight_decay=recipe.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, recipe))
    model.train()
    for step in range(recipe.steps):
        length = recipe.lengths[step % len(recipe.lengths)]
        rows = recipe.batch // length // len(streams)
        batch = torch.cat([windows(s, rows, length, source) for s in streams.values()])
        out = model(batch, output_router_logits=True)
        losses = token_losses(out.logits, batch).view(len(streams), -1).mean(1)
        balance = balance_loss(out.router_logits, model.config.num_experts_per_tok)
        torch.autograd.backward(losses.mean() + recipe.balance * balance)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        tell(Progress(step, dict(zip(streams, losses.tolist(), strict=True)), balance.item()))
    model.eval()


def token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Nats [rows, length - 1] of every token but the first; logits [rows, length, vocab]."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")


def balance_loss(router_logits: Sequence[Tensor], top_k: int) -> Tensor:
    """Mean over layers of experts * sum(share of choices * mean probability); 1.0 when even.

    router_logits: [tokens, experts] of each layer.  (Fedus et al., arXiv:2101.03961, eq. 4.)
    """
    return torch.stack([_layer_balance(logits, top_k) for logits in router_logits]).mean()


def _layer_balance(logits: Tensor, top_k: int) -> Tensor:
    experts = logits.shape[-1]
    chosen = logits.topk(top_k).indices
    share = torch.bincount(chosen.flatten(), minlength=experts) / chosen.numel()
    return experts * (share * logits.softmax(-1).mean(0)).sum()


def _rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then linear decay to zero."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    return (recipe.steps - step) / (recipe.steps - recipe.warmup)
