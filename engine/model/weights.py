"""A model's weights as torch tensors under Hugging Face names, checked to be all that is needed."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from engine.model import gguf_file, safetensors_dir
from engine.model.config import ModelConfig, Moe
from engine.model.expert_weights import per_expert
from engine.model.families import FAMILIES
from engine.model.formats import Storage
from engine.model.gguf_header import read_header
from engine.model.quantise import int8
from engine.model.reading import unsupported
from engine.model.refs import ModelFiles
from engine.model.weight import Weight, dense

Shapes = dict[str, tuple[int, ...]]

_DENSE = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MATRICES = ("_proj.weight", "embed_tokens.weight", "lm_head.weight")
_NOT_WEIGHTS = (".rotary_emb.inv_freq", "rope_freqs.weight")
"""A buffer that old checkpoints contain, and a table that is in `ModelConfig.rope`."""


def load_weights(
    files: ModelFiles, config: ModelConfig, dtype: torch.dtype, storage: Storage | None = None
) -> dict[str, Weight]:
    """Contiguous CPU tensors by Hugging Face name; "lm_head.weight" only when it is not tied.

    storage: of projections, embedding and head; norms, biases and routers are of `dtype`, as is
    everything without it.  "gguf", for GGUF files: codes as they are, float32 for other types.

    An expert has `experts.E.gate_up_proj.weight` [2 * intermediate, hidden], gate first, and
    `experts.E.down_proj.weight`; norm weights are what normalised values are multiplied with.

    Raises ModelUnsupported naming the tensors that are missing, unexpected or misshapen.
    """
    expected = expected_shapes(config)
    weights: dict[str, Weight] = {}
    unexpected = []
    for name, weight in _read(files, config, as_stored=storage == "gguf"):
        if name in expected:
            kept = storage if name.endswith(_MATRICES) else None
            weights[name] = _stored(weight, dtype, kept)
        elif not _derivable(name, config):
            unexpected.append(name)
    _refuse(config, "does not have", (n for n in expected if n not in weights))
    _refuse(config, "has, unexpectedly,", unexpected)
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    misshapen = (
        f"{n} {shapes[n]}, not {expected[n]}" for n in expected if shapes[n] != expected[n]
    )
    _refuse(config, "has of another shape", misshapen)
    return weights


def expected_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Name -> shape of every weight a model of this configuration has."""
    table = (config.vocab_size, config.hidden)
    shapes: Shapes = {"model.embed_tokens.weight": table, "model.norm.weight": (config.hidden,)}
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = table
    sparse = set(config.moe_layers)
    for index in range(config.layers):
        layer = _attention(config) | _norms(config)
        if config.moe is not None and index in sparse:
            layer |= _experts(config, config.moe)
        else:
            layer |= _mlp("mlp.", config.intermediate, config.hidden)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _attention(config: ModelConfig) -> Shapes:
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    outputs = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    shapes: Shapes = {f"self_attn.{n}.weight": (out, config.hidden) for n, out in outputs.items()}
    shapes["self_attn.o_proj.weight"] = (config.hidden, q)
    if config.qkv_bias:
        shapes |= {f"self_attn.{n}.bias": (out,) for n, out in outputs.items()}
    if config.out_bias:
        shapes["self_attn.o_proj.bias"] = (config.hidden,)
    if config.qk_norm != "none":
        whole = config.qk_norm == "all"
        shapes["self_attn.q_norm.weight"] = (q if whole else config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (kv if whole else config.head_dim,)
    return shapes


def _norms(config: ModelConfig) -> Shapes:
    names = ["input_layernorm", "post_attention_layernorm"]
    if config.sandwich_norms:
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return {f"{name}.weight": (config.hidden,) for name in names}


def _mlp(at: str, intermediate: int, hidden: int) -> Shapes:
    return {
        f"{at}gate_proj.weight": (intermediate, hidden),
        f"{at}up_proj.weight": (intermediate, hidden),
        f"{at}down_proj.weight": (hidden, intermediate),
    }


def _experts(config: ModelConfig, moe: Moe) -> Shapes:
    shapes: Shapes = {"mlp.gate.weight": (moe.experts, config.hidden)}
    for at in (f"mlp.experts.{expert}." for expert in range(moe.experts)):
        shapes[f"{at}gate_up_proj.weight"] = (2 * moe.intermediate, config.hidden)
        shapes[f"{at}down_proj.weight"] = (config.hidden, moe.intermediate)
    if moe.shared_intermediate:
        shapes |= _mlp("mlp.shared_expert.", moe.shared_intermediate, config.hidden)
        shapes["mlp.shared_expert_gate.weight"] = (1, config.hidden)
    return shapes


def _read(files: ModelFiles, config: ModelConfig, as_stored: bool) -> Iterator[tuple[str, Weight]]:
    tensors: Iterator[tuple[str, Weight]] = (
        _from_folder(files, config)
        if files.kind == "hf"
        else gguf_file.read_tensors(read_header(files.path), config, as_stored)
    )
    return tensors if config.moe is None else per_expert(tensors, config.moe.experts)


def _from_folder(files: ModelFiles, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    family = FAMILIES[config.architecture]
    for name, tensor in safetensors_dir.read_tensors(files.path):
        norm = family.norm_offset and name.endswith("norm.weight")
        yield family.canonical(name), tensor.float() + family.norm_offset if norm else tensor


def _stored(weight: Weight, dtype: torch.dtype, storage: Storage | None) -> Weight:
    if storage == "gguf":
        return weight
    if storage == "int8":
        return int8(dense(weight))
    return dense(weight).to(_DENSE[storage] if storage else dtype).contiguous()


def _derivable(name: str, config: ModelConfig) -> bool:
    return name.endswith(_NOT_WEIGHTS) or (name == "lm_head.weight" and config.tied_embeddings)


def _refuse(config: ModelConfig, what: str, names: Iterable[str]) -> None:
    """Raises when there are any names; shows the first five."""
    found = list(names)
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        names = f"{', '.join(found[:5])}{more}"
        raise unsupported(config.name, f"its file {what} {names}; fetch it again, or give another")
