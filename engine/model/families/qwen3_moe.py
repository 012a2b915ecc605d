"""Qwen3-MoE: a Qwen3 with many small experts, none shared (Yang et al., arXiv:2505.09388)."""

from dataclasses import replace

from engine.model.config import ModelConfig
from engine.model.families import gguf, hf, qwen2, qwen2_moe
from engine.model.families.family import Family
from engine.model.families.gguf import GgufConfig
from engine.model.families.hf import HfConfig


def from_hf(raw: HfConfig) -> ModelConfig:
    config, bias = hf.dense(raw), raw.flag("attention_bias")
    window = raw.values.get("sliding_window") if raw.flag("use_sliding_window") else 0
    return replace(
        config,
        windows=(window or 0,) * config.layers,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        moe=qwen2_moe.sparse(raw, config.layers),
    )


def from_gguf(raw: GgufConfig) -> ModelConfig:
    config = gguf.dense(raw, "qwen3_moe")
    return replace(config, qk_norm="head", moe=gguf.moe(raw, normalise=True))


FAMILY = Family(
    "qwen3_moe",
    from_hf,
    qwen2.DEFAULTS | {"num_key_value_heads": 4, "decoder_sparse_step": 1},
    "qwen3moe",
    from_gguf,
)
