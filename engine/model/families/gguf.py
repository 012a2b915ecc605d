"""Reading llama.cpp's metadata: what all families call alike.

Biases are those whose tensors are there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.model import ends
from engine.model.config import ModelConfig, Moe, Rope
from engine.model.gguf_header import GgufHeader, read_floats
from engine.model.reading import refuse, unsupported

_KV_HEADS = "attention.head_count_kv"
_HEAD_SIZES = ("attention.value_length", "rope.dimension_count")
_ROPE_TABLE = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class GgufConfig:
    """values: the metadata of the file's own architecture, without its prefix."""

    header: GgufHeader
    name: str

    @property
    def values(self) -> Mapping[str, Any]:
        metadata = self.header.metadata
        prefix = f"{metadata.get('general.architecture')}."
        return {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}

    def size(self, key: str, default: object = None) -> int:
        value = self.values.get(key, default)
        if not isinstance(value, int) or value < 1:
            raise unsupported(self.name, f"its metadata has {key} = {value!r}")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    def width(self, tensor: str) -> int:
        """Outputs of a projection, of one expert if it is a stack."""
        if not self.has(tensor):
            raise unsupported(self.name, f"its file has no tensor {tensor}")
        return self.header.tensors[tensor].shape[-2]


def dense(raw: GgufConfig, architecture: str) -> ModelConfig:
    """A model without experts and windows; families replace what they have of these."""
    values, metadata = raw.values, raw.header.metadata
    _check(raw, values)
    heads, hidden = raw.size("attention.head_count"), raw.size("embedding_length")
    layers = raw.size("block_count")
    head_dim = values.get("attention.key_length", hidden // heads)
    sizes = {head_dim, *(values[k] for k in _HEAD_SIZES if k in values)}
    refuse(raw.name, {f"heads of several sizes {sorted(sizes)}": len(sizes) > 1})
    angles = _rope(raw, values, head_dim)
    return ModelConfig(
        architecture=architecture,
        name=raw.name,
        layers=layers,
        hidden=hidden,
        intermediate=raw.size("feed_forward_length"),
        heads=heads,
        kv_heads=raw.size(_KV_HEADS, heads),
        head_dim=head_dim,
        vocab_size=raw.width("token_embd.weight"),
        max_len=raw.size("context_length"),
        rope=angles,
        local_rope=angles,
        norm_eps=float(values.get("attention.layer_norm_rms_epsilon", 1e-5)),
        tied_embeddings=not raw.has("output.weight"),
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_ids=ends.in_gguf(metadata),
        windows=(0,) * layers,
        scale=head_dim**-0.5,
        qkv_bias=raw.has("blk.0.attn_q.bias"),
        out_bias=raw.has("blk.0.attn_output.bias"),
    )


def moe(raw: GgufConfig, normalise: bool) -> Moe | None:
    """None when the file has no experts.  With them, every layer has some."""
    if not raw.values.get("expert_count"):
        return None
    shared = "blk.0.ffn_gate_shexp.weight"
    return Moe(
        experts=raw.size("expert_count"),
        top_k=raw.size("expert_used_count"),
        intermediate=raw.width("blk.0.ffn_gate_exps.weight"),
        normalise=normalise,
        shared_intermediate=raw.width(shared) if raw.has(shared) else 0,
    )


def _check(raw: GgufConfig, values: Mapping[str, Any]) -> None:
    scaling = values.get("rope.scaling.type", "none")
    refuse(
        raw.name,
        {
            f"rope scaling {scaling!r}": scaling not in ("none", "linear"),
            "clipped queries, keys and values": bool(values.get("attention.clamp_kqv")),
            "soft-capped logits": bool(
                values.get("final_logit_softcapping") or values.get("attn_logit_softcapping")
            ),
            "weights in other files": raw.header.metadata.get("split.count", 0) > 1,
            "no token embeddings": not raw.has("token_embd.weight"),
        },
    )


def _rope(raw: GgufConfig, values: Mapping[str, Any], head_dim: int) -> Rope:
    theta = float(values.get("rope.freq_base", 10000.0))
    linear = values.get("rope.scaling.type") == "linear"
    if not raw.has(_ROPE_TABLE):
        factor = float(values.get("rope.scaling.factor", 1.0))
        return Rope(theta, "linear", factor) if linear else Rope(theta)
    refuse(raw.name, {"two kinds of rope scaling": linear})
    divisors = read_floats(raw.header, _ROPE_TABLE, head_dim // 2)
    return Rope(theta, "table", divisors=divisors)
