"""The model and its folder: plain Hugging Face files, weights in bfloat16."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.learned_moe.tokens import END, VOCAB_SIZE

FOLDER = Path(__file__).parent / "model"
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""It has seen no conversations: chat messages are text to go on from."""


def build(seed: int) -> Qwen3MoeForCausalLM:
    """Untrained, float32: 4 layers of 16 experts, 2 to a token; 1.9 M weights."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        eos_token_id=0,
    )
    return Qwen3MoeForCausalLM(config)


def save(model: Qwen3MoeForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Rounds the weights of `model` itself to bfloat16."""
    model.to(torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        chat_template=_TEMPLATE,
        model_max_length=model.config.max_position_embeddings,
    ).save_pretrained(folder)


def load_model(folder: Path = FOLDER) -> Qwen3MoeForCausalLM:
    """float32, as the engine runs it on a CPU."""
    return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)


def load_tokenizer(folder: Path = FOLDER) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
