"""A tiny random Llama from a seed, as a Hugging Face folder: steps take a millisecond or two."""

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.model import refs
from engine.model.build import build_decoder
from engine.model.config_file import load_config
from engine.model.decoder import Decoder
from engine.model.formats import Storage
from engine.model.ops import TorchOps
from engine.model.weights import load_weights
from engine.reference import Step, greedy

VOCAB = 256
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def tiny_model(folder: Path, seed: int = 7) -> Path:
    """Write config and weights.  Scaled so that the next token depends on the whole context."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    weights = {
        "model.embed_tokens.weight": normal(VOCAB, 64, scale=1.0),
        "model.norm.weight": torch.ones(64),
    }
    for layer in range(2):
        at = f"model.layers.{layer}."
        weights |= {
            at + "input_layernorm.weight": torch.ones(64),
            at + "post_attention_layernorm.weight": torch.ones(64),
            at + "self_attn.q_proj.weight": normal(64, 64, scale=0.25),
            at + "self_attn.k_proj.weight": normal(32, 64, scale=0.25),
            at + "self_attn.v_proj.weight": normal(32, 64, scale=0.25),
            at + "self_attn.o_proj.weight": normal(64, 64, scale=0.25),
            at + "mlp.gate_proj.weight": normal(128, 64, scale=0.25),
            at + "mlp.up_proj.weight": normal(128, 64, scale=0.25),
            at + "mlp.down_proj.weight": normal(64, 128, scale=0.25),
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, folder / "model.safetensors")
    return folder


def decoder(path: Path, storage: Storage | None = None) -> Decoder:
    """The model of these files in plain torch, float32."""
    files = refs.resolve(str(path))
    config = load_config(files)
    weights = load_weights(files, config, torch.float32, storage)
    return build_decoder(config, weights, TorchOps(torch.float32))


class Oracle:
    """The plain loop over the tiny model, in the test's own process."""

    def __init__(self, folder: Path) -> None:
        self._model = decoder(folder)
        self.config = self._model.config
        self.steps = cache(self._steps)

    def tokens(self, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
        """Greedy output, end-of-sequence ignored."""
        return [s.token for s in self.steps(prompt, max_tokens)]

    def _steps(self, prompt: tuple[int, ...], max_tokens: int) -> list[Step]:
        return greedy(self._model, self.config, prompt, max_tokens, eos_ids=())
