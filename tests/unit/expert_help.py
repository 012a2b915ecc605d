"""A tiny mixture-of-experts decoder by seed, and what its router chooses in one plain pass."""

from collections.abc import Sequence

import torch

from engine.model.build import build_decoder
from engine.model.config import ModelConfig, Moe, Rope
from engine.model.decoder import Decoder
from engine.model.ops import TorchOps
from engine.reference import DenseAttention

VOCAB = 61
HIDDEN, INNER, HEADS, LAYERS = 16, 12, 2, 3
MOE = Moe(experts=5, top_k=2, intermediate=INNER, normalise=True, dense_layers=frozenset({1}))


def moe_decoder(seed: int = 0, moe: Moe | None = MOE) -> Decoder:
    """Three layers, the middle one dense; all dense without `moe`."""
    config = ModelConfig(
        architecture="mixtral",
        name="tiny",
        layers=LAYERS,
        hidden=HIDDEN,
        intermediate=INNER,
        heads=HEADS,
        kv_heads=HEADS,
        head_dim=HIDDEN // HEADS,
        vocab_size=VOCAB,
        max_len=512,
        rope=Rope(),
        local_rope=Rope(),
        norm_eps=1e-5,
        tied_embeddings=True,
        bos_id=None,
        eos_ids=(),
        windows=(0,) * LAYERS,
        scale=0.35,
        moe=moe,
    )
    generator = torch.Generator().manual_seed(seed)
    weights = {
        f"{name}.weight": torch.randn(shape, generator=generator) * (len(shape) < 2 or 0.5)
        for name, shape in _shapes(config).items()
    }
    return build_decoder(config, weights, TorchOps(torch.float32))


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (VOCAB, HIDDEN),
        "model.norm": (HIDDEN,),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {at + f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {at + f"{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")}
        if config.moe is None or layer in config.moe.dense_layers:
            shapes |= {at + f"mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}
            shapes[at + "mlp.down_proj"] = (HIDDEN, INNER)
            continue
        shapes[at + "mlp.gate"] = (config.moe.experts, HIDDEN)
        for expert in range(config.moe.experts):
            shapes[at + f"mlp.experts.{expert}.gate_up_proj"] = (2 * INNER, HIDDEN)
            shapes[at + f"mlp.experts.{expert}.down_proj"] = (HIDDEN, INNER)
    return shapes


def plain_counts(model: Decoder, tokens: Sequence[int]) -> tuple[int, ...]:
    """[MoE layer x expert] of all tokens, from one forward pass without blocks or batches."""
    assert model.config.moe is not None
    counts: list[int] = []

    def log(chosen: torch.Tensor) -> None:
        assert model.config.moe is not None
        counts.extend(chosen.flatten().bincount(minlength=model.config.moe.experts).tolist())

    attention = DenseAttention(model.config, len(tokens), model.dtype)
    with torch.inference_mode():
        model.hidden(torch.tensor(list(tokens)), torch.arange(len(tokens)), attention, log)
    return tuple(counts)
