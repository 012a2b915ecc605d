"""Qwen3: a Qwen2 whose queries and keys are normalised head by head (Yang et al.,
arXiv:2505.09388)."""

from dataclasses import replace

from engine.model.config import ModelConfig
from engine.model.families import gguf, qwen2
from engine.model.families.family import Family
from engine.model.families.gguf import GgufConfig
from engine.model.families.hf import HfConfig
from engine.model.reading import refuse


def from_hf(raw: HfConfig) -> ModelConfig:
    bias = raw.flag("attention_bias")
    return replace(qwen2.windowed(raw), qkv_bias=bias, out_bias=bias, qk_norm="head")


def from_gguf(raw: GgufConfig) -> ModelConfig:
    refuse(raw.name, {"a sliding window": bool(raw.values.get("attention.sliding_window"))})
    return replace(gguf.dense(raw, "qwen3"), qk_norm="head")


FAMILY = Family("qwen3", from_hf, qwen2.DEFAULTS | {"head_dim": 128}, "qwen3", from_gguf)
