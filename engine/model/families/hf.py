"""Reading config.json: what all families call alike."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.model import ends
from engine.model.config import Activation, ModelConfig, Moe, Rope
from engine.model.reading import refuse, unsupported

_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class HfConfig:
    """values: of config.json over the family's defaults.  name: of the model, for errors."""

    values: Mapping[str, Any]
    name: str

    def size(self, key: str, least: int = 1) -> int:
        value = self.values.get(key)
        if not isinstance(value, int) or value < least:
            raise unsupported(self.name, f"its configuration has {key} = {value!r}")
        return value

    def flag(self, key: str) -> bool:
        return bool(self.values.get(key))

    def having(self, **values: Any) -> "HfConfig":
        return replace(self, values={**self.values, **values})


def dense(raw: HfConfig) -> ModelConfig:
    """A model without experts, windows and biases; families replace what they have of these."""
    values = raw.values
    activation = values.get("hidden_act") or "silu"
    refuse(
        raw.name,
        {
            f"activation {activation!r}": activation not in _ACTIVATIONS,
            "quantised safetensors": raw.flag("quantization_config"),
        },
    )
    heads, hidden = raw.size("num_attention_heads"), raw.size("hidden_size")
    layers, head_dim = raw.size("num_hidden_layers"), values.get("head_dim") or hidden // heads
    angles = rope(raw, rope_settings(raw))
    return ModelConfig(
        architecture=values["model_type"],
        name=raw.name,
        layers=layers,
        hidden=hidden,
        intermediate=raw.size("intermediate_size"),
        heads=heads,
        kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab_size=raw.size("vocab_size"),
        max_len=values.get("max_position_embeddings") or 2048,
        rope=angles,
        local_rope=angles,
        norm_eps=float(values.get("rms_norm_eps") or 1e-6),
        tied_embeddings=raw.flag("tie_word_embeddings"),
        bos_id=values.get("bos_token_id"),
        eos_ids=ends.token_ids(values.get("eos_token_id")),
        windows=(0,) * layers,
        scale=head_dim**-0.5,
        activation=_ACTIVATIONS[activation],
    )


def rope_settings(raw: HfConfig) -> Mapping[str, Any]:
    """Under the name of transformers 5, or else of transformers 4."""
    found = raw.values.get("rope_parameters") or raw.values.get("rope_scaling") or {}
    return found if isinstance(found, dict) else {"rope_type": found}


def rope(raw: HfConfig, settings: Mapping[str, Any]) -> Rope:
    kind = settings.get("rope_type", settings.get("type", "default"))
    share = settings.get("partial_rotary_factor", raw.values.get("partial_rotary_factor"))
    refuse(
        raw.name,
        {
            f"rope scaling {kind!r}": kind not in ("default", "linear", "llama3"),
            "partial rotary embeddings": share not in (None, 1.0),
        },
    )
    theta = float(settings.get("rope_theta") or raw.values.get("rope_theta") or 1e4)
    if kind == "default":
        return Rope(theta)
    try:
        if kind == "linear":
            return Rope(theta, "linear", float(settings["factor"]))
        trained = settings.get("original_max_position_embeddings")
        return Rope(
            theta,
            "llama3",
            factor=float(settings["factor"]),
            low_freq=float(settings["low_freq_factor"]),
            high_freq=float(settings["high_freq_factor"]),
            original_len=trained or raw.size("max_position_embeddings"),
        )
    except KeyError as error:
        raise unsupported(raw.name, f"its rope scaling {kind!r} lacks {error}") from error


def windows(raw: HfConfig, layers: int, slides: Callable[[int], bool]) -> tuple[int, ...]:
    """`ModelConfig.windows`.  slides: which layers have a window when the file lists no types."""
    window = raw.values.get("sliding_window") or 0
    types = raw.values.get("layer_types")
    if types is None:
        return tuple(window if slides(i) else 0 for i in range(layers))
    others = sorted({str(kind) for kind in types if kind not in _LAYER_TYPES})
    refuse(
        raw.name,
        {
            f"layers of type {', '.join(others)}": bool(others),
            f"types for {len(types)} of {layers} layers": len(types) != layers,
        },
    )
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def moe(raw: HfConfig, intermediate: int, normalise: bool) -> Moe:
    """Every layer has experts; transformers writes their number under either of two names."""
    key = "num_local_experts" if raw.values.get("num_local_experts") else "num_experts"
    experts, top_k = raw.size(key), raw.size("num_experts_per_tok")
    refuse(raw.name, {f"{top_k} experts per token of {experts} in all": top_k > experts})
    return Moe(experts, top_k, intermediate, normalise)
