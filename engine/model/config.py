"""The shape of a model, whatever its files call things.

Imports no torch: the edge reads the length limit and the stop ids from here too.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Activation: TypeAlias = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Rope:
    """theta: base of the frequencies.  scaling stretches them to a longer context:

    linear  all frequencies divided by `factor` (position interpolation, arXiv:2306.15595)
    llama3  those of wavelengths beyond original_len / low_freq are divided by `factor`, those
            below original_len / high_freq stay, those between are blended
            (`rope_type: llama3` of Hugging Face transformers)
    table   frequency i divided by divisors[i] (`rope_freqs.weight` of llama.cpp)
    """

    theta: float = 10000.0
    scaling: Literal["none", "linear", "llama3", "table"] = "none"
    factor: float = 1.0
    low_freq: float = 1.0
    high_freq: float = 4.0
    original_len: int = 8192
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Moe:
    """Mixture of experts.  intermediate, shared_intermediate (0: no shared expert): elements.

    normalise: shares of the chosen experts sum to 1.  dense_layers: layers with a plain MLP.
    """

    experts: int
    top_k: int
    intermediate: int
    normalise: bool
    shared_intermediate: int = 0
    dense_layers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """architecture: the family, by Hugging Face's model_type.  hidden, intermediate, head_dim:
    elements.

    max_len: positions the model was trained for.  eos_ids: tokens that end an answer, sorted.
    qkv_bias, out_bias: the projections into and out of attention have biases.
    qk_norm: queries and keys are normalised, each head by itself or all heads together.
    windows: per layer, how many positions a token sees, itself included; 0: all before it.
    scale: of attention scores.  local_rope: of the layers with a window.
    sandwich_norms: sublayers are normalised after as well as before.
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
    rope: Rope
    local_rope: Rope
    norm_eps: float
    tied_embeddings: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]
    windows: tuple[int, ...]
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "all"] = "none"
    activation: Activation = "silu"
    sandwich_norms: bool = False
    embedding_scale: float = 1.0
    moe: Moe | None = None

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers that have experts, in order."""
        if self.moe is None:
            return ()
        return tuple(i for i in range(self.layers) if i not in self.moe.dense_layers)
