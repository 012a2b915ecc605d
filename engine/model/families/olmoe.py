"""OLMoE: queries and keys normalised over all heads together, experts in every layer
(Muennighoff et al., arXiv:2409.02060)."""

from dataclasses import replace

from engine.model.config import ModelConfig
from engine.model.families import gguf, hf
from engine.model.families.family import Family
from engine.model.families.gguf import GgufConfig
from engine.model.families.hf import HfConfig
from engine.model.reading import refuse


def from_hf(raw: HfConfig) -> ModelConfig:
    clipped = raw.values.get("clip_qkv") is not None
    refuse(raw.name, {"clipped queries, keys and values": clipped})
    config, bias = hf.dense(raw), raw.flag("attention_bias")
    moe = hf.moe(raw, config.intermediate, raw.flag("norm_topk_prob"))
    return replace(config, qkv_bias=bias, out_bias=bias, qk_norm="all", moe=moe)


def from_gguf(raw: GgufConfig) -> ModelConfig:
    config = gguf.dense(raw, "olmoe")
    return replace(config, qk_norm="all", moe=gguf.moe(raw, normalise=False))


FAMILY = Family(
    "olmoe",
    from_hf,
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    gguf="olmoe",
    from_gguf=from_gguf,
)
