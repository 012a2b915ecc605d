"""A model's weights as torch tensors under Hugging Face names, checked to be all that is needed."""

from collections.abc import Iterable, Mapping

import torch

from engine.model import gguf_file, safetensors_dir
from engine.model.config import ModelConfig, load_config, unsupported
from engine.model.digest import model_digest
from engine.model.gguf_header import read_header
from engine.model.refs import ModelFiles

__all__ = ["expected_shapes", "load_config", "load_weights", "model_digest"]

_NOT_WEIGHTS = ".rotary_emb.inv_freq"
"""A buffer that old checkpoints contain; it follows from the configuration."""


def load_weights(
    files: ModelFiles, config: ModelConfig, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Contiguous CPU tensors by Hugging Face name; "lm_head.weight" only when it is not tied.

    Raises ModelUnsupported naming the tensors that are missing, unexpected or misshapen.
    """
    expected = expected_shapes(config)
    weights: dict[str, torch.Tensor] = {}
    unexpected = []
    for name, tensor in _read(files, config):
        if name in expected:
            weights[name] = tensor.to(dtype).contiguous()
        elif not _derivable(name, config):
            unexpected.append(name)
    _refuse(config, "does not have", (n for n in expected if n not in weights))
    _refuse(config, "has, unexpectedly,", unexpected)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    misshapen = (
        f"{n} {shapes[n]}, not {expected[n]}" for n in expected if shapes[n] != expected[n]
    )
    _refuse(config, "has of another shape", misshapen)
    return weights


def expected_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Name -> shape of every weight a model of this configuration has."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = {
        "q_proj": (q, config.hidden),
        "k_proj": (kv, config.hidden),
        "v_proj": (kv, config.hidden),
        "o_proj": (config.hidden, q),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (config.hidden,),
        "post_attention_layernorm.weight": (config.hidden,),
        "mlp.gate_proj.weight": (config.intermediate, config.hidden),
        "mlp.up_proj.weight": (config.intermediate, config.hidden),
        "mlp.down_proj.weight": (config.hidden, config.intermediate),
        **{f"self_attn.{name}.weight": shape for name, shape in attention.items()},
    }
    if config.attention_bias:
        layer |= {f"self_attn.{name}.bias": shape[:1] for name, shape in attention.items()}
    table = (config.vocab_size, config.hidden)
    return {
        "model.embed_tokens.weight": table,
        "model.norm.weight": (config.hidden,),
        **({} if config.tied_embeddings else {"lm_head.weight": table}),
        **{f"model.layers.{i}.{n}": s for i in range(config.layers) for n, s in layer.items()},
    }


def _read(files: ModelFiles, config: ModelConfig) -> Iterable[tuple[str, torch.Tensor]]:
    if files.kind == "hf":
        return safetensors_dir.read_tensors(files.path)
    arrays = gguf_file.read_tensors(read_header(files.path), config)
    return ((name, torch.from_numpy(array)) for name, array in arrays)


def _derivable(name: str, config: ModelConfig) -> bool:
    return name.endswith(_NOT_WEIGHTS) or (name == "lm_head.weight" and config.tied_embeddings)


def _refuse(config: ModelConfig, what: str, names: Iterable[str]) -> None:
    """Raises when there are any names; shows the first five."""
    found = list(names)
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise unsupported(config.name, f"its file {what} {', '.join(found[:5])}{more}")
