"""Llama 1 to 3, SmolLM (Touvron et al., arXiv:2302.13971; Dubey et al., arXiv:2407.21783).

llama.cpp calls Mistral and Mixtral "llama" too: experts and a window tell them apart.
"""

from dataclasses import replace

from engine.model.config import ModelConfig
from engine.model.families import gguf, hf
from engine.model.families.family import Family
from engine.model.families.gguf import GgufConfig
from engine.model.families.hf import HfConfig
from engine.model.reading import refuse


def from_hf(raw: HfConfig) -> ModelConfig:
    refuse(raw.name, {"biases in the MLP": raw.flag("mlp_bias")})
    bias = raw.flag("attention_bias")
    return replace(hf.dense(raw), qkv_bias=bias, out_bias=bias)


def from_gguf(raw: GgufConfig) -> ModelConfig:
    config = gguf.dense(raw, "llama")
    window = raw.values.get("attention.sliding_window") or 0
    moe = gguf.moe(raw, normalise=True)
    return replace(
        config,
        architecture="mixtral" if moe else "mistral" if window else "llama",
        windows=(window,) * config.layers,
        moe=moe,
    )


FAMILY = Family("llama", from_hf, gguf="llama", from_gguf=from_gguf, interleaved=True)
