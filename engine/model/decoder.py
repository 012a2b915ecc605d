"""The decoder that all supported families are made of: attention, then an MLP, layer by layer.

What differs between families (biases, norms of queries and keys, norms after the sublayers,
windows, experts) is in `ModelConfig` and in which weights there are; see `engine.model.families`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from engine.model.attention import Attention
from engine.model.config import ModelConfig
from engine.model.mlp import Mlp
from engine.model.ops import Linear, Ops, Rotation
from engine.model.rope import frequencies, rotation
from engine.model.weight import Weight

ExpertLog: TypeAlias = Callable[[Tensor], None]
"""Called once per MoE layer, in order, with the experts each token went to, [T, k] int64."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; norms that its family does not have are None.

    qkv: q, k and v stacked.  query_norm, key_norm: of each head ([head_dim]) or of all heads
    together ([heads * head_dim]).  after_attention, after_mlp: norms before the residual sum.
    """

    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Linear
    after_attention: Tensor | None
    mlp_norm: Tensor
    mlp: Mlp
    after_mlp: Tensor | None


class Decoder:
    """Immutable, so any thread may call it.  Activations are in the dtype of `ops`."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        embedding: Weight,
        layers: Sequence[Layer],
        norm: Tensor,
        head: Linear,
    ) -> None:
        """Made by `engine.model.build.build_decoder`."""
        self.config = config
        self.layers = tuple(layers)
        self._ops = ops
        self._embedding = embedding
        self._norm = norm
        self.head = head
        device = norm.device
        self._frequencies = frequencies(config.rope, config.head_dim).to(device)
        self._local = frequencies(config.local_rope, config.head_dim).to(device)

    @property
    def dtype(self) -> torch.dtype:
        return self._ops.dtype

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        log: ExpertLog | None = None,
    ) -> Tensor:
        """token_ids and positions [T] int64, any number of sequences -> [T, hidden]."""
        x = self.embed(token_ids)
        return self.advance(x, positions, attention, range(len(self.layers)), log)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden], what the first layer takes."""
        x = self._ops.embed(self._embedding, token_ids)
        scale = self.config.embedding_scale
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype)

    def advance(
        self,
        x: Tensor,
        positions: Tensor,
        attention: Attention,
        layers: range,
        log: ExpertLog | None = None,
    ) -> Tensor:
        """x [T, hidden] through these layers only."""
        far = rotation(positions, self._frequencies, self.dtype)
        near = far
        if self.config.local_rope != self.config.rope:
            near = rotation(positions, self._local, self.dtype)
        for index in layers:
            angles = near if self.config.windows[index] else far
            x = self._attend(index, x, angles, attention)
            x = self._feed(index, x, log)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] -> [S, vocab] float32, of the rows that are to be sampled only."""
        return self.head(self._rms_norm(hidden, self._norm)).float()

    def _attend(self, index: int, x: Tensor, angles: Rotation, attention: Attention) -> Tensor:
        layer, config, ops = self.layers[index], self.config, self._ops
        qkv = layer.qkv(self._rms_norm(x, layer.input_norm))
        qkv = qkv.view(len(x), -1, config.head_dim)
        turning = config.heads + config.kv_heads
        value = qkv[:, turning:]
        if layer.query_norm is None or layer.key_norm is None:
            turned = ops.rotate(qkv[:, :turning], angles)
            query, key = turned[:, : config.heads], turned[:, config.heads :]
        else:
            query, key = qkv[:, : config.heads], qkv[:, config.heads : turning]
            query = ops.rotate(self._head_norm(query, layer.query_norm), angles)
            key = ops.rotate(self._head_norm(key, layer.key_norm), angles)
        out = layer.out(attention(index, query, key, value).flatten(1))
        return x + self._maybe_norm(out, layer.after_attention)

    def _feed(self, index: int, x: Tensor, log: ExpertLog | None) -> Tensor:
        layer = self.layers[index]
        out = layer.mlp(self._rms_norm(x, layer.mlp_norm), log)
        return x + self._maybe_norm(out, layer.after_mlp)

    def _head_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, heads, head_dim]; weight of one head or of all."""
        if weight.numel() == x.shape[-1]:
            return self._rms_norm(x, weight)
        return self._rms_norm(x.flatten(1), weight).view(x.shape)

    def _maybe_norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._rms_norm(x, weight)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._ops.rms_norm(x, weight, self.config.norm_eps)
