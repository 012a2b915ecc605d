"""A mixture of experts with random weights, larger than any cache: how fast, not how clever."""

from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def write(folder: Path, seed: int = 0) -> Path:
    """A Hugging Face folder: 6 layers of 32 experts, 4 to a token; 0.5 GB in float32."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=384,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder
