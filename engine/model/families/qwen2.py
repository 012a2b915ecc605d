"""Qwen2 and Qwen2.5: biases on q, k and v, windows in the upper layers if they are switched on
(Yang et al., arXiv:2407.10671)."""

from dataclasses import replace

from engine.model.config import ModelConfig
from engine.model.families import gguf, hf
from engine.model.families.family import Family
from engine.model.families.gguf import GgufConfig
from engine.model.families.hf import HfConfig
from engine.model.reading import refuse

DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def from_hf(raw: HfConfig) -> ModelConfig:
    return replace(windowed(raw), qkv_bias=True)


def windowed(raw: HfConfig) -> ModelConfig:
    """Without biases: what Qwen2 and Qwen3 share."""
    config = hf.dense(raw)
    if not raw.flag("use_sliding_window"):
        return config
    first = raw.size("max_window_layers", least=0)
    return replace(config, windows=hf.windows(raw, config.layers, lambda layer: layer >= first))


def from_gguf(raw: GgufConfig) -> ModelConfig:
    refuse(raw.name, {"a sliding window": bool(raw.values.get("attention.sliding_window"))})
    return gguf.dense(raw, "qwen2")


FAMILY = Family("qwen2", from_hf, DEFAULTS, "qwen2", from_gguf)
