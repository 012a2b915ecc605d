"""What one architecture's files mean: the entry every family makes in the registry."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.model.config import ModelConfig
from engine.model.families.gguf import GgufConfig
from engine.model.families.hf import HfConfig


@dataclass(frozen=True, slots=True)
class Family:
    """architecture: Hugging Face's model_type.  gguf: llama.cpp's name of it.

    defaults     what transformers takes for keys that config.json lacks
    hf_names     parts of Hugging Face tensor names -> the canonical ones
    gguf_names   stems of llama.cpp's layer tensors whose canonical name differs from the usual
    norm_offset  what to add to the norm weights of a Hugging Face folder; GGUF files have it added
    interleaved  llama.cpp keeps q and k rows in the order of its own rotary embedding
    """

    architecture: str
    from_hf: Callable[[HfConfig], ModelConfig]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    gguf: str | None = None
    from_gguf: Callable[[GgufConfig], ModelConfig] | None = None
    hf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0
    interleaved: bool = False

    def canonical(self, hf_name: str) -> str:
        for theirs, ours in self.hf_names.items():
            hf_name = hf_name.replace(theirs, ours)
        return hf_name
