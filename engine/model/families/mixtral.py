"""Mixtral: a Mistral with experts (Jiang et al., arXiv:2401.04088).

In GGUF files it is a "llama".
"""

from dataclasses import replace

from engine.model.config import ModelConfig
from engine.model.families import hf, mistral
from engine.model.families.family import Family
from engine.model.families.hf import HfConfig


def from_hf(raw: HfConfig) -> ModelConfig:
    config = mistral.from_hf(raw)
    return replace(config, moe=hf.moe(raw, config.intermediate, normalise=True))


FAMILY = Family(
    "mixtral",
    from_hf,
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    hf_names={
        ".block_sparse_moe.": ".mlp.",
        ".w1.": ".gate_proj.",
        ".w3.": ".up_proj.",
        ".w2.": ".down_proj.",
    },
    interleaved=True,
)
