"""The tensors of a GGUF file, dequantised and named as Hugging Face names them.

llama.cpp stores q and k rows of the llama architecture interleaved (its rotary embedding turns
neighbouring elements); here they go back to Hugging Face's order of two halves.
"""

import re
from collections.abc import Iterator
from typing import Any, TypeAlias

import gguf
import numpy as np
import numpy.typing as npt

from engine.model.config import ModelConfig, unsupported
from engine.model.gguf_header import GgufHeader, GgufTensor

Floats: TypeAlias = npt.NDArray[np.float32]

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_ROW_BLOCKS = 512
"""`gguf.dequantize` works on 16 rows at a time; rows of 512 quantisation blocks keep that in the
second-level cache and the number of calls small (SmolLM2: 0.5 s instead of 2.6 s)."""


def read_tensors(header: GgufHeader, config: ModelConfig) -> Iterator[tuple[str, Floats]]:
    """(Hugging Face name, fresh float32 array) of each tensor, in file order.

    A name without a Hugging Face counterpart stays as it is.  Raises ModelUnsupported for a
    quantisation the `gguf` package does not know and for a file that ends too early.
    """
    data = np.memmap(header.path, mode="r", dtype=np.uint8)
    for tensor in header.tensors.values():
        name = hf_name(tensor.name)
        values = _dequantise(_bytes_of(tensor, data, config.name), tensor, config.name)
        yield name, _unpermute(values, name, config)


def hf_name(name: str) -> str:
    """ "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"."""
    parts = _NAME.fullmatch(name)
    if parts is None:
        return name
    layer, stem, suffix = parts.groups()
    if layer is None:
        return f"{_TOP[stem]}.{suffix}" if stem in _TOP else name
    return f"model.layers.{layer}.{_LAYER[stem]}.{suffix}" if stem in _LAYER else name


def stored_bytes(tensor: GgufTensor, model: str) -> int:
    """Bytes of the tensor in its file.  Raises ModelUnsupported for an unknown type."""
    block, size = gguf.GGML_QUANT_SIZES[_type_of(tensor, model)]
    return int(tensor.elements // block * size)


def _type_of(tensor: GgufTensor, model: str) -> Any:
    try:
        return gguf.GGMLQuantizationType(tensor.type_id)
    except ValueError:
        why = f"tensor {tensor.name} has the unknown GGML type {tensor.type_id}"
        raise unsupported(model, why) from None


def _bytes_of(tensor: GgufTensor, data: npt.NDArray[np.uint8], model: str) -> npt.NDArray[np.uint8]:
    end = tensor.offset + stored_bytes(tensor, model)
    if end > data.size:
        why = f"its file ends inside tensor {tensor.name}, at {data.size} of {end} bytes"
        raise unsupported(model, f"{why}; fetch it again")
    return data[tensor.offset : end]


def _dequantise(raw: npt.NDArray[np.uint8], tensor: GgufTensor, model: str) -> Floats:
    kind = _type_of(tensor, model)
    if kind == gguf.GGMLQuantizationType.F32:
        return raw.view(np.float32).reshape(tensor.shape).copy()
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = raw.size // size
    row = np.gcd(blocks, _ROW_BLOCKS)
    try:
        values: Floats = gguf.dequantize(raw.reshape(-1, row * size), kind)
    except NotImplementedError:
        why = f"tensor {tensor.name} is stored as {kind.name}, which gguf cannot dequantise"
        raise unsupported(model, why) from None
    return values.reshape(tensor.shape)


def _unpermute(values: Floats, name: str, config: ModelConfig) -> Floats:
    """Rows [heads, head_dim / 2, 2] -> [heads, 2, head_dim / 2] of q and k; others unchanged."""
    if ".self_attn.q_proj." in name:
        heads = config.heads
    elif ".self_attn.k_proj." in name:
        heads = config.kv_heads
    else:
        return values
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
