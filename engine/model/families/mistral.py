"""Mistral: a Llama whose layers see a sliding window (Jiang et al., arXiv:2310.06825).

In GGUF files it is a "llama".
"""

from dataclasses import replace

from engine.model.config import ModelConfig
from engine.model.families import hf
from engine.model.families.family import Family
from engine.model.families.hf import HfConfig


def from_hf(raw: HfConfig) -> ModelConfig:
    config = hf.dense(raw)
    return replace(config, windows=(raw.values.get("sliding_window") or 0,) * config.layers)


FAMILY = Family(
    "mistral",
    from_hf,
    defaults={
        "sliding_window": 4096,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    interleaved=True,
)
