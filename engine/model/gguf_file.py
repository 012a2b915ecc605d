"""The tensors of a GGUF file under the names that Hugging Face gives them.

llama.cpp stores q and k rows of the llama architecture interleaved (its rotary embedding turns
neighbouring elements); here they go back to Hugging Face's order of two halves.
"""

import re
from collections.abc import Iterator
from typing import Any, TypeAlias

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.families import FAMILIES
from engine.model.families.family import Family
from engine.model.gguf_header import GgufHeader, GgufTensor
from engine.model.quantise import from_gguf
from engine.model.reading import unsupported
from engine.model.weight import Weight

Floats: TypeAlias = npt.NDArray[np.float32]

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_ROW = ".shared_expert_gate.weight"
"""A matrix of one row, which llama.cpp keeps as a vector."""
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_ROW_BLOCKS = 512
"""`gguf.dequantize` works on 16 rows at a time; rows of 512 quantisation blocks keep that in the
second-level cache and the number of calls small (SmolLM2: 0.5 s instead of 2.6 s)."""


def read_tensors(
    header: GgufHeader, config: ModelConfig, as_stored: bool = False
) -> Iterator[tuple[str, Weight]]:
    """(Hugging Face name, fresh float32 tensor) of each tensor, in file order; as_stored: matrices
    as the file's own codes or bfloat16 where those can be kept, [..., in] as [out, in] then.

    A name without a Hugging Face counterpart stays as it is.  Raises ModelUnsupported for a
    quantisation the `gguf` package does not know and for a file that ends too early.
    """
    family = FAMILIES[config.architecture]
    data = np.memmap(header.path, mode="r", dtype=np.uint8)
    for tensor in header.tensors.values():
        name = hf_name(tensor.name, family)
        raw = _bytes_of(tensor, data, config.name)
        weight = _kept(raw, tensor) if as_stored and len(tensor.shape) > 1 else None
        if weight is None:
            weight = torch.from_numpy(_dequantise(raw, tensor, config.name))
            weight = weight.view(1, -1) if name.endswith(_ROW) else weight
        order = _row_order(name, config) if family.interleaved else None
        yield name, weight if order is None else weight[order]


def hf_name(name: str, family: Family) -> str:
    """ "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"."""
    parts = _NAME.fullmatch(name)
    if parts is None:
        return name
    layer, stem, suffix = parts.groups()
    if layer is None:
        return f"{_TOP[stem]}.{suffix}" if stem in _TOP else name
    found = family.gguf_names.get(stem) or _LAYER.get(stem)
    return f"model.layers.{layer}.{found}.{suffix}" if found else name


def stored_bytes(tensor: GgufTensor, model: str) -> int:
    """Bytes of the tensor in its file.  Raises ModelUnsupported for an unknown type."""
    block, size = gguf.GGML_QUANT_SIZES[ggml_type(tensor, model)]
    return int(tensor.elements // block * size)


def ggml_type(tensor: GgufTensor, model: str) -> Any:
    """A member of `gguf.GGMLQuantizationType`.  Raises ModelUnsupported for an unknown type."""
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


def _kept(raw: npt.NDArray[np.uint8], tensor: GgufTensor) -> Weight | None:
    if tensor.type_id == gguf.GGMLQuantizationType.BF16:
        return torch.from_numpy(raw.copy()).view(torch.bfloat16).view(tensor.shape)
    return from_gguf(raw, tensor.type_id, tensor.shape)


def _dequantise(raw: npt.NDArray[np.uint8], tensor: GgufTensor, model: str) -> Floats:
    kind = ggml_type(tensor, model)
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


def _row_order(name: str, config: ModelConfig) -> Tensor | None:
    """Rows [heads, head_dim / 2, 2] -> [heads, 2, head_dim / 2] of q and k; None for others."""
    if ".self_attn.q_proj." in name:
        heads = config.heads
    elif ".self_attn.k_proj." in name:
        heads = config.kv_heads
    else:
        return None
    rows = torch.arange(heads * config.head_dim)
    return rows.view(heads, -1, 2).transpose(1, 2).flatten()
