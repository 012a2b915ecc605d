"""Tensor parallelism from outside the model: a rank's decoder, its partial sums completed.

Two all-reduces per layer, after the attention's output projection and after the MLP, and one
gather of the logits (Megatron-LM, arXiv:1909.08053).
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.build import Weights, build_decoder
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.mlp import Mlp
from engine.model.ops import Linear, Ops
from engine.parallel.collectives import Collectives
from engine.parallel.shard import shard_weights
from engine.parallel.split import config_of_rank, part


@dataclass(frozen=True, slots=True)
class ReducedLinear:
    """A matrix split by columns."""

    own: Linear
    group: Collectives

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.own(x))


@dataclass(frozen=True, slots=True)
class ReducedMlp:
    """An MLP of which each rank has some neurons, or of each expert some.

    Every rank routes alike: routers are whole, and their inputs the same bits everywhere.
    """

    own: Mlp
    group: Collectives

    def __call__(self, x: Tensor, log: Callable[[Tensor], None] | None) -> Tensor:
        return self.group.all_reduce(self.own(x, log))


@dataclass(frozen=True, slots=True)
class GatheredHead:
    """A vocabulary of which each rank has some words.  Rank 0 gets the logits of all [T, vocab];
    the others keep their own, which nobody looks at."""

    own: Linear
    group: Collectives
    vocab: int

    def __call__(self, x: Tensor) -> Tensor:
        size = self.group.size
        own = self.own(x)
        widest = -(-self.vocab // size)
        every = self.group.gather(F.pad(own, (0, widest - own.shape[1])))
        if not every:
            return own
        shares = [part(self.vocab, rank, size) for rank in range(size)]
        return torch.cat([e[:, : s.stop - s.start] for e, s in zip(every, shares, strict=True)], 1)


def build_rank(config: ModelConfig, weights: Weights, ops: Ops, group: Collectives) -> Decoder:
    """The decoder of this rank out of the weights of the whole model, which it empties."""
    own = config_of_rank(config, group.size)
    shard = shard_weights(weights, group.rank, group.size)
    decoder = copy(build_decoder(own, shard, ops))
    decoder.layers = tuple(
        replace(layer, out=ReducedLinear(layer.out, group), mlp=ReducedMlp(layer.mlp, group))
        for layer in decoder.layers
    )
    decoder.head = GatheredHead(decoder.head, group, config.vocab_size)
    return decoder
