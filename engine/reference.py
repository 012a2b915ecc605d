"""The plain loop that Trireme is checked against at run time (`trireme doctor`).

One sequence, contiguous K and V, attention spelled out; no pool, no batches, no paging.  It
shares the weights and the layer arithmetic of the model, which tests hold against transformers.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Step:
    """A greedy token, and how far its logit is above the second best.

    A gap within 1e-3 is a tie: another order of summation may choose the other token.
    """

    token: int
    gap: float


def greedy(
    model: Decoder,
    config: ModelConfig,
    tokens: Sequence[int],
    max_tokens: int,
    eos_ids: Collection[int],
) -> list[Step]:
    """At most max_tokens steps after the prompt `tokens`; a token of `eos_ids` is the last."""
    attention = DenseAttention(config, len(tokens) + max_tokens, model.dtype)
    steps: list[Step] = []
    inputs = list(tokens)
    with torch.inference_mode():
        while len(steps) < max_tokens:
            positions = torch.arange(attention.length, attention.length + len(inputs))
            hidden = model.hidden(torch.tensor(inputs), positions, attention)
            attention.length += len(inputs)
            logits = model.logits(hidden[-1])
            best, second = logits.topk(2).values.tolist()
            token = int(logits.argmax())
            steps.append(Step(token, best - second))
            if token in eos_ids:
                break
            inputs = [token]
    return steps


class DenseAttention:
    """Causal attention of one sequence.  length: tokens whose K and V are kept from past calls."""

    def __init__(self, config: ModelConfig, capacity: int, dtype: torch.dtype) -> None:
        shape = (config.layers, 2, config.kv_heads, capacity, config.head_dim)
        self._kv = torch.zeros(shape, dtype=dtype)
        self._config = config
        self.length = 0

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        end = self.length + len(query)
        kept = self._kv[layer, :, :, :end]
        kept[:, :, self.length :] = torch.stack((key, value)).transpose(1, 2)
        config = self._config
        keys, values = kept.repeat_interleave(config.heads // config.kv_heads, dim=1)
        scores = query.transpose(0, 1) @ keys.transpose(1, 2) * config.scale
        behind = torch.arange(self.length, end)[:, None] - torch.arange(end)
        hidden = (behind < 0) | (behind >= (config.windows[layer] or end))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1, dtype=torch.float32)
        out: Tensor = (weights.to(values.dtype) @ values).transpose(0, 1)
        return out
