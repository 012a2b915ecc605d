"""Every family, from the files that transformers writes, computes what transformers computes."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.model.build import build_decoder
from engine.model.config_file import load_config
from engine.model.decoder import Decoder
from engine.model.ops import TorchOps
from engine.model.refs import resolve
from engine.model.weights import load_weights
from engine.policy.plan import Plan
from engine.reference import greedy
from tests.models import WINDOW, make, twin
from tests.unit.llama_help import Bench, oracle_logits, random_tokens

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-biased": ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR}),
    "mistral": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "mistral-window-beyond-contexts": ("mistral", {"sliding_window": 500}),
    "qwen2": ("qwen2", {}),
    "qwen2-upper-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-biased": ("qwen3", {"attention_bias": True, "head_dim": 32}),
    "gemma3": ("gemma3_text", {}),
    "gemma3-other-scale": ("gemma3_text", {"query_pre_attn_scalar": 40, "attention_bias": True}),
    "gemma3-linear-rope": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": WINDOW, "num_experts_per_tok": 1}),
    "qwen2-moe": ("qwen2_moe", {}),
    "qwen2-moe-every-second-layer": (
        "qwen2_moe",
        {
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
        },
    ),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen3-moe-window": (
        "qwen3_moe",
        {
            "norm_topk_prob": False,
            "mlp_only_layers": [0],
            "use_sliding_window": True,
            "sliding_window": WINDOW,
        },
    ),
    "olmoe": ("olmoe", {}),
    "olmoe-normalised": ("olmoe", {"norm_topk_prob": True, "num_key_value_heads": 4}),
}
AROUND_WINDOWS_AND_BLOCKS = (1, 11, 12, 13, 16, 17, 40)
TIE = 1e-3
variants = pytest.mark.parametrize("variant", VARIANTS)


@cache
def pair(variant: str) -> tuple[Decoder, PreTrainedModel]:
    """Ours, from files, and transformers' own."""
    family, changes = VARIANTS[variant]
    with TemporaryDirectory() as folder:
        files = resolve(str(make(family, Path(folder), **changes)))
        config = load_config(files)
        weights = load_weights(files, config, torch.float32)
    model = build_decoder(config, weights, TorchOps(torch.float32))
    assert not weights, "every weight that is loaded is also used"
    return model, twin(family, **changes)


def assert_choices(oracle: PreTrainedModel, prompt: tuple[int, ...], output: list[int]) -> None:
    """Each the oracle's argmax given what came before, up to ties."""
    logits = oracle_logits(oracle, [*prompt, *output[:-1]])[len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(output)[:, None]).squeeze(1)
    assert bool((chosen >= logits.amax(1) - TIE).all())


@variants
def test_logits_are_close_to_transformers(variant: str) -> None:
    model, oracle = pair(variant)
    bench = Bench(model)
    tokens = random_tokens(5, 45)
    logits = bench.logits(Plan((bench.work(bench.start(tokens), 45),)))[0]
    expected = oracle_logits(oracle, tokens)[-1]
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)


@variants
def test_greedy_tokens_of_a_batch_equal_transformers(variant: str) -> None:
    model, oracle = pair(variant)
    bench = Bench(model)
    runnings = [bench.start(random_tokens(n, n), name=str(n)) for n in AROUND_WINDOWS_AND_BLOCKS]
    for _ in range(8):
        bench.step(runnings)
    for running in runnings:
        assert len(running.output) == 8
        assert_choices(oracle, running.prompt, running.output)


@variants
def test_a_prompt_in_chunks_beside_a_decode_equals_transformers(variant: str) -> None:
    model, oracle = pair(variant)
    bench = Bench(model, block_size=8)
    early, late = bench.start(random_tokens(1, 14)), bench.start(random_tokens(2, 37), name="late")
    bench.step([early])
    for _ in range(8):
        bench.step([early, late], most=7)  # a token for the one, seven of the prompt at most
    assert len(late.output) == 3
    for running in (early, late):
        assert_choices(oracle, running.prompt, running.output)


@variants
def test_the_plain_loop_equals_transformers(variant: str) -> None:
    model, oracle = pair(variant)
    prompt = random_tokens(3, 29)
    steps = greedy(model, model.config, prompt, 6, eos_ids=())
    assert_choices(oracle, prompt, [step.token for step in steps])


@pytest.mark.parametrize("variant", ["mixtral", "qwen2-moe", "qwen3-moe-window"])
def test_the_log_of_a_step_hears_the_choices_of_each_expert_layer_in_order(variant: str) -> None:
    model, oracle = pair(variant)
    assert model.config.moe is not None
    bench, tokens = Bench(model), random_tokens(4, 20)
    heard: list[torch.Tensor] = []
    bench.logits(Plan((bench.work(bench.start(tokens), 20),)), heard.append)
    with torch.inference_mode():
        scores = oracle(torch.tensor([tokens]), output_router_logits=True).router_logits
    assert len(heard) == len(scores) == len(model.config.moe_layers)
    for chosen, score in zip(heard, scores, strict=True):
        assert torch.equal(chosen, score.topk(model.config.moe.top_k).indices)
