"""Gemma 3, text only (Gemma team, arXiv:2503.19786).

Norms before and after each sublayer whose weights are stored less 1, scaled embeddings, and five
layers with a window and a rotary embedding of their own for each one that sees everything.
"""

from dataclasses import replace

from engine.model.config import ModelConfig, Rope
from engine.model.families import gguf, hf
from engine.model.families.family import Family
from engine.model.families.gguf import GgufConfig
from engine.model.families.hf import HfConfig
from engine.model.reading import refuse

_ARCHITECTURE = "gemma3_text"
_LOCAL_THETA = 1e4
_LAYERS_27B = 62
"""llama.cpp tells the one size with another scale of attention by its number of layers."""


def from_hf(raw: HfConfig) -> ModelConfig:
    values = raw.values
    caps = [values.get(f"{what}_logit_softcapping") for what in ("final", "attn")]
    refuse(
        raw.name,
        {
            "soft-capped logits": any(cap is not None for cap in caps),
            "attention in both directions": raw.flag("use_bidirectional_attention"),
        },
    )
    settings = hf.rope_settings(raw)
    far = settings.get("full_attention", settings) or {}
    near = settings.get("sliding_attention") or {"rope_theta": values["rope_local_base_freq"]}
    config = hf.dense(raw.having(rope_parameters=far, hidden_act=values["hidden_activation"]))
    every, bias = raw.size("sliding_window_pattern"), raw.flag("attention_bias")
    return replace(
        _gemma(config),
        qkv_bias=bias,
        out_bias=bias,
        scale=raw.size("query_pre_attn_scalar") ** -0.5,
        local_rope=hf.rope(raw, near),
        windows=hf.windows(raw, config.layers, lambda layer: (layer + 1) % every > 0),
    )


def from_gguf(raw: GgufConfig) -> ModelConfig:
    config, values = gguf.dense(raw, _ARCHITECTURE), raw.values
    window, every = values.get("attention.sliding_window") or 0, 6
    if config.layers == _LAYERS_27B:
        config = replace(config, scale=(config.hidden // config.heads) ** -0.5)
    return replace(
        _gemma(config),
        local_rope=Rope(float(values.get("rope.freq_base_swa", _LOCAL_THETA))),
        windows=tuple(window if (i + 1) % every else 0 for i in range(config.layers)),
    )


def _gemma(config: ModelConfig) -> ModelConfig:
    return replace(
        config,
        qk_norm="head",
        activation="gelu_tanh",
        sandwich_norms=True,
        embedding_scale=config.hidden**0.5,
    )


FAMILY = Family(
    _ARCHITECTURE,
    from_hf,
    defaults={
        "rope_theta": 1e6,
        "rope_local_base_freq": _LOCAL_THETA,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "head_dim": 256,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": 262208,
    },
    gguf="gemma3",
    from_gguf=from_gguf,
    gguf_names={
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    norm_offset=1.0,
)
