"""A decoder from a dictionary of weights under Hugging Face names."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.model.config import ModelConfig, Moe
from engine.model.decoder import Decoder, Layer
from engine.model.mlp import DenseMlp, Mlp, MoeMlp, SharedExpert
from engine.model.ops import Linear, Ops
from engine.model.weight import Weight, dense

Weights = dict[str, Weight]


def build_decoder(config: ModelConfig, weights: Weights, ops: Ops) -> Decoder:
    """weights: all of `engine.model.weights.expected_shapes`, by Hugging Face name.

    Empties `weights` on the way, so that repacked copies do not double the memory.
    """
    take = _Taker(weights, ops)
    embedding = weights.pop("model.embed_tokens.weight")
    layers = [_layer(config, take, i) for i in range(config.layers)]
    head = embedding if config.tied_embeddings else weights.pop("lm_head.weight")
    return Decoder(config, ops, embedding, layers, take.norm("model.norm"), ops.linear([head]))


class _Taker:
    """Takes weights out of the dictionary in the shape the decoder wants them."""

    def __init__(self, weights: Weights, ops: Ops) -> None:
        self._weights = weights
        self.ops = ops

    def linear(self, *names: str) -> Linear:
        """The stacked outputs of these projections, with their biases if they have any."""
        parts = [self._weights.pop(f"{name}.weight") for name in names]
        biases = [
            dense(self._weights.pop(bias)) for n in names if (bias := f"{n}.bias") in self._weights
        ]
        return self.ops.linear(parts, torch.cat(biases).to(self.ops.dtype) if biases else None)

    def matrices(self, names: Sequence[str]) -> list[Weight]:
        return [self._weights.pop(f"{name}.weight") for name in names]

    def norm(self, name: str) -> Tensor:
        return dense(self._weights.pop(f"{name}.weight")).to(self.ops.dtype)

    def norm_if(self, present: bool, name: str) -> Tensor | None:
        return self.norm(name) if present else None


def _layer(config: ModelConfig, take: _Taker, index: int) -> Layer:
    at = f"model.layers.{index}."
    attention = at + "self_attn."
    before_mlp = (
        "pre_feedforward_layernorm" if config.sandwich_norms else "post_attention_layernorm"
    )
    return Layer(
        input_norm=take.norm(at + "input_layernorm"),
        qkv=take.linear(*(f"{attention}{name}_proj" for name in "qkv")),
        query_norm=take.norm_if(config.qk_norm != "none", attention + "q_norm"),
        key_norm=take.norm_if(config.qk_norm != "none", attention + "k_norm"),
        out=take.linear(attention + "o_proj"),
        after_attention=take.norm_if(config.sandwich_norms, at + "post_attention_layernorm"),
        mlp_norm=take.norm(at + before_mlp),
        mlp=_mlp(config, take, index),
        after_mlp=take.norm_if(config.sandwich_norms, at + "post_feedforward_layernorm"),
    )


def _mlp(config: ModelConfig, take: _Taker, index: int) -> Mlp:
    at = f"model.layers.{index}.mlp."
    if config.moe is None or index in config.moe.dense_layers:
        return _dense_mlp(config, take, at)
    return _moe_mlp(config, config.moe, take, at)


def _dense_mlp(config: ModelConfig, take: _Taker, at: str) -> DenseMlp:
    gate_up = take.linear(at + "gate_proj", at + "up_proj")
    return DenseMlp(gate_up, take.linear(at + "down_proj"), config.activation, take.ops)


def _moe_mlp(config: ModelConfig, moe: Moe, take: _Taker, at: str) -> MoeMlp:
    experts = [f"{at}experts.{e}." for e in range(moe.experts)]
    shared = None
    if moe.shared_intermediate:
        mlp = _dense_mlp(config, take, at + "shared_expert.")
        shared = SharedExpert(mlp, take.linear(at + "shared_expert_gate"))
    return MoeMlp(
        router=take.linear(at + "gate"),
        experts=take.ops.experts(
            take.matrices([e + "gate_up_proj" for e in experts]),
            take.matrices([e + "down_proj" for e in experts]),
            config.activation,
        ),
        top_k=moe.top_k,
        normalise=moe.normalise,
        shared=shared,
    )
