"""Models of transformers as GGUF files, the way llama.cpp's converter writes them: names by the
`gguf` package's own map, metadata by its own methods."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
}
F32 = gguf.GGMLQuantizationType.F32


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: gguf.GGMLQuantizationType = F32,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> dict[str, torch.Tensor]:
    """kind: of matrices; vectors stay float32, as in llama.cpp.  metadata: more keys; a value of
    None leaves the key out.  tensors: more of them.

    Returns the weights that the file then stands for, under the names our loader gives them.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    _describe(writer, config)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        if value not in (None, []):
            add_value(writer, key, value)
    names = gguf.get_tensor_name_map(_arch(architecture), config.num_hidden_layers)
    stands_for = {}
    for name, rows in _tensors(model):
        stored_kind = kind if rows.ndim > 1 else F32
        stored = gguf.quantize(rows, stored_kind)
        stands_for[name] = torch.from_numpy(gguf.dequantize(stored, stored_kind).copy())
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        raw = None if stored_kind.name in ("F32", "F16") else stored_kind
        writer.add_tensor(theirs, _arranged(stored, name, config), raw_dtype=raw)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return canonical(stands_for)


def canonical(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stacks of experts [experts, …] as one gate_up_proj and one down_proj per expert."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        at, stack, kind = name.removesuffix(".weight").partition(".experts.")
        if not stack or tensor.ndim < 3:
            found[name] = tensor
        elif kind == "gate_proj":
            both = torch.cat((tensor, weights[name.replace("gate_proj", "up_proj")]), 1)
            found |= {f"{at}.experts.{e}.gate_up_proj.weight": w for e, w in enumerate(both)}
        elif kind != "up_proj":
            found |= {f"{at}.experts.{e}.{kind}.weight": w for e, w in enumerate(tensor)}
    return found


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, np.ndarray]]:
    """As llama.cpp keeps them apart: tied heads left out, gates and ups in stacks of their own,
    1 added to Gemma's norms."""
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            gate, up = np.split(values, 2, axis=1)
            yield f"{stem}gate_proj.weight", np.ascontiguousarray(gate)
            yield f"{stem}up_proj.weight", np.ascontiguousarray(up)
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", values
        elif model.config.model_type == "gemma3_text" and name.endswith("norm.weight"):
            yield name, values + 1
        else:
            yield name, values


def _arranged(stored: np.ndarray, name: str, config: PretrainedConfig) -> np.ndarray:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    owner = name.rsplit(".", 2)[1]
    if owner in heads and ARCHITECTURES[config.model_type] == "llama":
        return interleaved(stored, heads[owner])
    return stored[0] if owner == "shared_expert_gate" else stored


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows: element i of the first half beside i of the second."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    order = [halves[:, half, i] for i in range(halves.shape[2]) for half in (0, 1)]
    return np.ascontiguousarray(np.stack(order, axis=1).reshape(rows.shape))


def _arch(name: str) -> Any:
    return next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == name)


def _describe(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
    keys = ("num_local_experts", "num_experts")
    if experts := next((n for k in keys if (n := getattr(config, k, None))), None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)


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
