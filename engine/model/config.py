"""The shape of a model, read from its files, whichever way they spell it.

Imports no torch: the edge reads the length limit and the stop ids from here too.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import ModelUnsupported, Stage
from engine.model.gguf_header import GgufHeader, read_header
from engine.model.refs import ModelFiles

SUPPORTED = "dense Llama (Llama 1 and 2, SmolLM, SmolLM2, Mistral without sliding window)"
CHAT_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>")
"""Special tokens after which a model has nothing more to say, whatever its files declare."""
_KV_HEADS = "attention.head_count_kv"
_HEAD_SIZES = ("attention.value_length", "rope.dimension_count")
_CONTROL = 3
"""`LLAMA_TOKEN_TYPE_CONTROL`: a special token, in GGUF's tokenizer.ggml.token_type."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """architecture: the code that runs it, "llama".  hidden, intermediate, head_dim: elements.

    max_len: positions the model was trained for.  eos_ids: tokens that end an answer, sorted.
    attention_bias: q, k, v and o projections have biases.
    """

    architecture: str
    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_len: int
    rope_theta: float
    norm_eps: float
    tied_embeddings: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]
    attention_bias: bool

    @staticmethod
    def from_hf(
        raw: Mapping[str, Any], name: str = "", eos_ids: tuple[int, ...] = ()
    ) -> "ModelConfig":
        """From the content of config.json.  Empty eos_ids: those of config.json itself.

        Raises ModelUnsupported naming the architecture or feature that is not supported.
        """
        _check_hf(raw, name)
        heads, hidden = _size(raw, "num_attention_heads", name), _size(raw, "hidden_size", name)
        return ModelConfig(
            architecture="llama",
            name=name,
            layers=_size(raw, "num_hidden_layers", name),
            hidden=hidden,
            intermediate=_size(raw, "intermediate_size", name),
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or hidden // heads,
            vocab_size=_size(raw, "vocab_size", name),
            max_len=raw.get("max_position_embeddings") or 2048,
            rope_theta=float(_rope(raw).get("rope_theta") or raw.get("rope_theta") or 10000.0),
            norm_eps=float(raw.get("rms_norm_eps") or 1e-6),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            bos_id=raw.get("bos_token_id"),
            eos_ids=eos_ids or _ids(raw.get("eos_token_id")),
            attention_bias=bool(raw.get("attention_bias", False)),
        )

    @staticmethod
    def from_gguf(header: GgufHeader, name: str = "") -> "ModelConfig":
        """From llama.cpp's metadata keys.  Raises ModelUnsupported like `from_hf`."""
        _check_gguf(header, name)
        raw = _section(header.metadata, "llama.")
        heads, hidden = (
            _size(raw, "attention.head_count", name),
            _size(raw, "embedding_length", name),
        )
        kv_heads = _size({_KV_HEADS: heads} | raw, _KV_HEADS, name)
        head_dim = raw.get("attention.key_length", hidden // heads)
        sizes = {head_dim, *(raw[k] for k in _HEAD_SIZES if k in raw)}
        _refuse_first(name, {f"heads of several sizes {sorted(sizes)}": len(sizes) > 1})
        return ModelConfig(
            architecture="llama",
            name=name,
            layers=_size(raw, "block_count", name),
            hidden=hidden,
            intermediate=_size(raw, "feed_forward_length", name),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=header.tensors["token_embd.weight"].shape[0],
            max_len=_size(raw, "context_length", name),
            rope_theta=float(raw.get("rope.freq_base", 10000.0)),
            norm_eps=float(raw.get("attention.layer_norm_rms_epsilon", 1e-5)),
            tied_embeddings="output.weight" not in header.tensors,
            bos_id=header.metadata.get("tokenizer.ggml.bos_token_id"),
            eos_ids=_gguf_eos(header.metadata),
            attention_bias="blk.0.attn_q.bias" in header.tensors,
        )


def load_config(files: ModelFiles) -> ModelConfig:
    """Raises ModelUnsupported when the model, or one of its files, cannot be used."""
    if files.kind == "gguf":
        return ModelConfig.from_gguf(read_header(files.path), files.name)
    raw = read_json(files.path / "config.json")
    return ModelConfig.from_hf(raw, files.name, _hf_eos(files.path, raw))


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; {} when there is no such file.  Raises ModelUnsupported on damage."""
    try:
        value = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise unsupported(path.parent.name, f"{path.name} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise unsupported(path.parent.name, f"{path.name} does not hold an object")
    return value


def unsupported(name: str, why: str) -> ModelUnsupported:
    """The error every file reader here raises: what is wrong, and what is supported."""
    return ModelUnsupported(
        f"model {name or '(unnamed)'}: {why}; supported: {SUPPORTED}",
        stage=Stage.START,
        field="model.ref",
    )


def _size(raw: Mapping[str, Any], key: str, name: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise unsupported(name, f"its configuration has {key} = {value!r}")
    return value


def _section(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}


def _rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rope settings under the name of transformers 5, or else of transformers 4."""
    found = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return found if isinstance(found, dict) else {"rope_type": found}


def _check_hf(raw: Mapping[str, Any], name: str) -> None:
    kind, rope = raw.get("model_type"), _rope(raw)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    rotary = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    window = 4096 if kind == "mistral" else None  # what transformers takes when the key is absent
    _refuse_first(
        name,
        {
            f"architecture {kind!r}": kind not in ("llama", "mistral"),
            f"rope scaling {rope_type!r}": rope_type != "default",
            "a sliding window": raw.get("sliding_window", window) is not None,
            "experts (MoE)": bool(raw.get("num_local_experts") or raw.get("num_experts")),
            f"activation {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
            "biases in the MLP": bool(raw.get("mlp_bias")),
            "partial rotary embeddings": rotary != 1.0,
            "quantised safetensors": bool(raw.get("quantization_config")),
        },
    )


def _check_gguf(header: GgufHeader, name: str) -> None:
    kind = header.metadata.get("general.architecture")
    raw = _section(header.metadata, "llama.")
    scaling = raw.get("rope.scaling.type", "none")
    _refuse_first(
        name,
        {
            f"architecture {kind!r}": kind != "llama",
            f"rope scaling {scaling!r}": scaling != "none",
            "rope scaling 'llama3'": "rope_freqs.weight" in header.tensors,
            "experts (MoE)": bool(raw.get("expert_count")),
            "a sliding window": bool(raw.get("attention.sliding_window")),
            "weights in other files": header.metadata.get("split.count", 0) > 1,
            "no token embeddings": "token_embd.weight" not in header.tensors,
        },
    )


def _refuse_first(name: str, features: Mapping[str, bool]) -> None:
    for feature, present in features.items():
        if present:
            raise unsupported(name, f"it has {feature}, which is not supported")


def _ids(value: object) -> tuple[int, ...]:
    """eos_token_id may be absent, a number or a list."""
    values = value if isinstance(value, list) else [value]
    return tuple(sorted({v for v in values if isinstance(v, int)}))


def _gguf_eos(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    raw = _section(metadata, "tokenizer.ggml.")
    declared = [raw.get(f"{name}_token_id") for name in ("eos", "eot")]
    kinds = zip(raw.get("tokens", []), raw.get("token_type", []), strict=False)
    ends = [i for i, (text, kind) in enumerate(kinds) if kind == _CONTROL and text in CHAT_ENDS]
    return _ids([*declared, *ends])


def _hf_eos(folder: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """generation_config.json has the last word; without it, what config and tokenizer declare."""
    stated = _ids(read_json(folder / "generation_config.json").get("eos_token_id"))
    if stated:
        return stated
    tokenizer = read_json(folder / "tokenizer_config.json")
    eos = tokenizer.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    added = tokenizer.get("added_tokens_decoder") or {}
    ends = [
        int(i)
        for i, token in added.items()
        if token.get("content") == text or (token.get("special") and token["content"] in CHAT_ENDS)
    ]
    return _ids([*_ids(raw.get("eos_token_id")), *ends])
