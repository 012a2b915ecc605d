"""The model over the paged pool computes what Hugging Face transformers computes."""

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.model.build import build_decoder
from engine.model.decoder import Decoder
from engine.model.ops import TorchOps
from engine.policy.plan import Plan
from tests.unit.llama_help import Bench, config_of, model_of, oracle_logits, random_tokens, smollm
from tests.unit.llama_help import twin as make_twin

SHAPES: dict[str, dict[str, Any]] = {
    "grouped_untied": {},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True},
    "head_dim_not_hidden_over_heads": {"head_dim": 24},
    "one_kv_head": {"num_key_value_heads": 1},
    "every_head_its_own_kv": {"num_key_value_heads": 4},
    "other_theta_and_eps": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "rms_norm_eps": 0.1,
    },
}
AROUND_BLOCKS = (1, 2, 15, 16, 17, 31, 32, 33, 48)


def assert_greedy_equal(
    model: Decoder, oracle: LlamaForCausalLM, lengths: tuple[int, ...], steps: int
) -> None:
    """All prompts in one batch; each choice must be the oracle's argmax given what came before."""
    bench = Bench(model)
    vocab = model.config.vocab_size
    runnings = [bench.start(random_tokens(n, n, vocab), name=str(n)) for n in lengths]
    for _ in range(steps):
        bench.step(runnings)
    for running in runnings:
        logits = oracle_logits(oracle, running.tokens[:-1])[len(running.prompt) - 1 :]
        assert running.output == logits.argmax(-1).tolist()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_greedy_tokens_equal_transformers(shape: dict[str, Any]) -> None:
    oracle = make_twin(**shape)
    assert_greedy_equal(model_of(oracle), oracle, AROUND_BLOCKS, steps=18)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_are_close_to_transformers(shape: dict[str, Any]) -> None:
    oracle = make_twin(**shape)
    bench = Bench(model_of(oracle))
    tokens = random_tokens(5, 37)
    running = bench.start(tokens)
    torch.testing.assert_close(
        bench.logits(Plan((bench.work(running, 37),)))[0],
        oracle_logits(oracle, tokens)[-1],
        atol=2e-5,
        rtol=1e-5,
    )


def test_smollm2_greedy_tokens_equal_transformers() -> None:
    model, oracle = smollm()
    assert_greedy_equal(model, oracle, (1, 15, 16, 17, 33), steps=6)


def test_smollm2_logits_are_close_to_transformers() -> None:
    model, oracle = smollm()
    bench = Bench(model)
    tokens = random_tokens(7, 63, model.config.vocab_size)
    running = bench.start(tokens)
    plan = Plan((bench.work(running, 63),))
    torch.testing.assert_close(
        bench.logits(plan)[0], oracle_logits(oracle, tokens)[-1], atol=2e-4, rtol=1e-4
    )


def test_bfloat16_runs_and_stays_close_to_transformers_in_float32() -> None:
    oracle = make_twin()
    bench = Bench(model_of(oracle, torch.bfloat16), dtype="bfloat16")
    tokens = random_tokens(9, 40)
    running = bench.start(tokens)
    expected = oracle_logits(oracle, tokens)[-1]
    actual = bench.logits(Plan((bench.work(running, 40),)))[0]
    assert actual.dtype == torch.float32
    assert (actual - expected).norm() < 0.03 * expected.norm()
    bench.step([running])
    bench.step([running])
    assert len(running.output) == 2


def test_building_a_model_takes_all_weights_so_that_none_is_held_twice() -> None:
    oracle = make_twin()
    weights = {name: tensor.clone() for name, tensor in oracle.state_dict().items()}
    build_decoder(config_of(oracle), weights, TorchOps(torch.float32))
    assert not weights
