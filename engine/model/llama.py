"""The Llama family: dense, pre-norm, grouped-query attention, RoPE, SwiGLU.

(Touvron et al., arXiv:2302.13971, arXiv:2307.09288.)  Llama, SmolLM and Mistral without a window.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.attention import Attention
from engine.model.config import ModelConfig
from engine.model.layers import Linear, Rotation, rotate, rotation, swiglu

Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer.  qkv: q, k and v stacked; gate_up: both halves of the MLP's input."""

    input_norm: Tensor
    qkv: Linear
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """Computes in the dtype of its weights.  Immutable, so any thread may call it."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        """weights: all of `engine.model.weights.expected_shapes`, by Hugging Face name.

        Empties `weights` on the way, so that the stacked copies do not double the memory.
        """
        self.config = config
        self._embedding = weights.pop("model.embed_tokens.weight")
        self._layers = tuple(_layer(weights, f"model.layers.{i}.") for i in range(config.layers))
        self._norm = weights.pop("model.norm.weight")
        self._head = Linear(
            self._embedding if config.tied_embeddings else weights.pop("lm_head.weight")
        )

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """token_ids and positions [T] int64, any number of sequences -> [T, hidden]."""
        config = self.config
        angles = rotation(positions, config.head_dim, config.rope_theta, self.dtype)
        x = F.embedding(token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            normed = self._rms_norm(x, layer.input_norm)
            x = x + layer.out(self._attend(index, layer.qkv(normed), angles, attention))
            x = x + layer.down(swiglu(layer.gate_up(self._rms_norm(x, layer.mlp_norm))))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] -> [S, vocab] float32, of the rows that are to be sampled only."""
        return self._head(self._rms_norm(hidden, self._norm)).float()

    def _attend(self, layer: int, qkv: Tensor, angles: Rotation, attention: Attention) -> Tensor:
        heads, kv_heads = self.config.heads, self.config.kv_heads
        rotated_heads = heads + kv_heads
        qkv = qkv.view(-1, rotated_heads + kv_heads, self.config.head_dim)
        query_key = rotate(qkv[:, :rotated_heads], angles)
        query, key, value = query_key[:, :heads], query_key[:, heads:], qkv[:, rotated_heads:]
        return attention(layer, query, key, value).flatten(1)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.norm_eps)


def _layer(weights: Weights, prefix: str) -> Layer:
    def stack(*names: str) -> Linear:
        parts = [weights.pop(f"{prefix}{name}.weight") for name in names]
        biases = [
            weights.pop(bias) for name in names if (bias := f"{prefix}{name}.bias") in weights
        ]
        return Linear(torch.cat(parts), torch.cat(biases) if biases else None)

    return Layer(
        input_norm=weights.pop(prefix + "input_layernorm.weight"),
        qkv=stack("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out=stack("self_attn.o_proj"),
        mlp_norm=weights.pop(prefix + "post_attention_layernorm.weight"),
        gate_up=stack("mlp.gate_proj", "mlp.up_proj"),
        down=stack("mlp.down_proj"),
    )
