"""Tiny random models of every family, by seed, as Hugging Face folders.

    folder = make("qwen3_moe", tmp_path)           # config.json, model.safetensors
    oracle = twin("qwen3_moe")                     # the same weights in transformers

Three layers (Gemma six: the last sees everything), a vocabulary of 97, windows of 12 where the
family has windows; widths are multiples of 32, so that most quantisations fit.  Weights are large
enough that greedy choices are seldom near-ties and depend on the whole context; experts differ.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 97
WINDOW = 12
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_experts": 6, "moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma3_text": {
        "num_hidden_layers": 6,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
    },
    "mixtral": {"num_experts_per_tok": 2, "num_local_experts": 6, "intermediate_size": 32},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 64, "mlp_only_layers": [1]},
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True},
    "olmoe": {"intermediate_size": 32, **EXPERTS},
}
"""model_type of transformers -> what differs from BASE."""
_SPREADS = {
    "embed_tokens": (0.0, 0.15),
    "norm": (3.0, 0.5),
    "norms": (1.0, 0.2),
    "matrices": (0.0, 0.25),
}
"""Mean and standard deviation.  Small embeddings and a large last norm: what layers add counts."""


def make(family: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write the model, as transformers saves it, into `folder`; returns it.

    family: a key of FAMILIES.  changes: of the transformers configuration.
    """
    twin(family, seed, **changes).save_pretrained(folder)
    return folder


def twin(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """The model that `make` writes, in transformers, float32."""
    shape = BASE | FAMILIES[family] | changes
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape)).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        mean, spread = _SPREADS[_kind(name)]
        if family == "gemma3_text" and "norm" in name:
            # Weights are stored less 1; strong layers stand up to the scaled embeddings.
            mean = (4.0 if "layernorm" in name else mean) - 1.0
        torch.nn.init.normal_(parameter, mean, spread, generator)
    return model


def _kind(name: str) -> str:
    if name.endswith(("embed_tokens.weight", "model.norm.weight")):
        return name.split(".")[1]
    return "norms" if "norm" in name else "matrices"
