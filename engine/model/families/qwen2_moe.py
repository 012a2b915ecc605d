"""Qwen1.5-MoE and Qwen2-MoE: many small experts and a shared one behind a sigmoid gate
(Yang et al., arXiv:2407.10671, section 2.2)."""

from dataclasses import replace

from engine.model.config import ModelConfig, Moe
from engine.model.families import gguf, hf, qwen2
from engine.model.families.family import Family
from engine.model.families.gguf import GgufConfig
from engine.model.families.hf import HfConfig


def from_hf(raw: HfConfig) -> ModelConfig:
    config = hf.dense(raw)
    windows = config.windows
    if raw.flag("use_sliding_window"):
        below = raw.size("max_window_layers", least=0)
        windows = hf.windows(raw, config.layers, lambda i: i % 2 == 0 and i < below)
    shared = raw.size("shared_expert_intermediate_size")
    return replace(
        config,
        windows=windows,
        qkv_bias=raw.flag("qkv_bias"),
        moe=replace(sparse(raw, config.layers), shared_intermediate=shared),
    )


def sparse(raw: HfConfig, layers: int) -> Moe:
    """Experts in every decoder_sparse_step-th layer that mlp_only_layers leaves out: what
    Qwen2-MoE and Qwen3-MoE share."""
    step, plain = raw.size("decoder_sparse_step"), raw.values.get("mlp_only_layers") or ()
    moe = hf.moe(raw, raw.size("moe_intermediate_size"), raw.flag("norm_topk_prob"))
    dense = frozenset(i for i in range(layers) if i in plain or (i + 1) % step)
    return replace(moe, dense_layers=dense)


def from_gguf(raw: GgufConfig) -> ModelConfig:
    config = gguf.dense(raw, "qwen2_moe")
    return replace(config, moe=gguf.moe(raw, normalise=False))


FAMILY = Family(
    "qwen2_moe",
    from_hf,
    qwen2.DEFAULTS | {"num_key_value_heads": 16, "decoder_sparse_step": 1, "qkv_bias": True},
    "qwen2moe",
    from_gguf,
)
