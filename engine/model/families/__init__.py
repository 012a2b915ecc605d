"""The architectures that run, by the names that files give them."""

from collections.abc import Mapping
from typing import Any

from engine.model.config import ModelConfig
from engine.model.families import (
    gemma3,
    llama,
    mistral,
    mixtral,
    olmoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from engine.model.families.family import Family
from engine.model.families.gguf import GgufConfig
from engine.model.families.hf import HfConfig
from engine.model.gguf_header import GgufHeader
from engine.model.reading import unsupported

FAMILIES: Mapping[str, Family] = {
    module.FAMILY.architecture: module.FAMILY
    for module in (
        gemma3,
        llama,
        mistral,
        mixtral,
        olmoe,
        qwen2,
        qwen2_moe,
        qwen3,
        qwen3_moe,
    )
}


def from_hf(raw: Mapping[str, Any], name: str = "") -> ModelConfig:
    """From the content of config.json.  Raises ModelUnsupported naming the architecture or the
    feature that is not supported."""
    family = FAMILIES.get(raw.get("model_type", ""))
    if family is None:
        raise _unknown(name, raw.get("model_type"), list(FAMILIES))
    return family.from_hf(HfConfig({**family.defaults, **raw}, name))


def from_gguf(header: GgufHeader, name: str = "") -> ModelConfig:
    """From llama.cpp's metadata keys.  Raises ModelUnsupported like `from_hf`."""
    readers = {f.gguf: f.from_gguf for f in FAMILIES.values() if f.gguf and f.from_gguf}
    architecture = header.metadata.get("general.architecture")
    if architecture not in readers:
        raise _unknown(name, architecture, list(readers))
    return readers[architecture](GgufConfig(header, name))


def _unknown(name: str, architecture: object, supported: list[str]) -> Exception:
    known = ", ".join(sorted(supported))
    why = f"its architecture {architecture!r} is not supported; give a model of one of: {known}"
    return unsupported(name, why)
