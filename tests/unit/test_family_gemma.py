"""A real Gemma 3 computes what transformers computes, within its window and beyond it."""

from functools import cache

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from engine.model.build import build_decoder
from engine.model.config import Rope
from engine.model.config_file import load_config
from engine.model.decoder import Decoder
from engine.model.ops import TorchOps
from engine.model.weights import load_weights
from engine.policy.plan import Plan
from tests.unit.gemma_help import gemma, needs_gemma
from tests.unit.llama_help import Bench, random_tokens
from tests.unit.test_family_oracle import assert_choices

PROMPTS = {
    "prose": (2, 818, 5279, 529, 7001, 563),  # The capital of France is
    "code": (2, 2063, 10779, 236769, 236749, 1473, 107, 140, 584),  # def fib(n):\n    if
    "bos-only": (2,),
}
pytestmark = needs_gemma


@cache
def pair() -> tuple[Decoder, Gemma3ForCausalLM]:
    """Over the same matrices; transformers' norm weights are ours less 1."""
    config = load_config(gemma())
    weights = load_weights(gemma(), config, torch.float32)
    with torch.device("meta"):
        oracle = Gemma3ForCausalLM(
            Gemma3TextConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden,
                intermediate_size=config.intermediate,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.kv_heads,
                head_dim=config.head_dim,
                sliding_window=512,
                max_position_embeddings=config.max_len,
            )
        ).eval()
    state = {name: w - 1 if name.endswith("norm.weight") else w for name, w in weights.items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    oracle.load_state_dict(state, assign=True)
    # What is computed from the configuration was left on the meta device.
    oracle.model.rotary_emb = type(oracle.model.rotary_emb)(oracle.config)
    scale = torch.tensor(oracle.model.embed_tokens.scalar_embed_scale)
    oracle.model.embed_tokens.embed_scale = scale
    return build_decoder(config, weights, TorchOps(torch.float32)), oracle


def test_the_file_s_shape_is_that_of_its_model_card() -> None:
    config = load_config(gemma())
    assert (config.layers, config.hidden, config.heads, config.kv_heads) == (18, 640, 4, 1)
    assert config.windows == (512, 512, 512, 512, 512, 0) * 3
    assert (config.rope, config.local_rope) == (Rope(1e6), Rope(1e4))
    assert (config.scale, config.max_len) == (1 / 16, 32768)
    assert config.eos_ids == (1, 106)


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_greedy_tokens_equal_transformers(prompt: tuple[int, ...]) -> None:
    model, oracle = pair()
    output = Bench(model).generate(prompt, 6)
    assert_choices(oracle, prompt, output)


def test_logits_beyond_the_window_are_close_to_transformers() -> None:
    model, oracle = pair()
    tokens = random_tokens(3, 530, model.config.vocab_size)
    bench = Bench(model)
    running = bench.start(tokens)
    bench.step([running], most=400)
    logits = bench.logits(Plan((bench.work(running, 400),)))[0]
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens]), logits_to_keep=1).logits[0, -1]
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
