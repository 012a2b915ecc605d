"""The run-time reference loop against transformers and against the paged runner."""

import pytest
import torch

from engine.reference import greedy
from tests.unit.llama_help import (
    Bench,
    model_of,
    oracle_greedy,
    oracle_logits,
    random_tokens,
    smollm,
    twin,
)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_reference_tokens_equal_transformers(heads: int) -> None:
    oracle = twin(num_key_value_heads=heads)
    model = model_of(oracle)
    prompt = random_tokens(3, 21)
    steps = greedy(model, model.config, prompt, 12, ())
    assert [s.token for s in steps] == oracle_greedy(oracle, prompt, 12)


def test_gap_is_the_distance_of_the_two_best_logits() -> None:
    oracle = twin()
    model = model_of(oracle)
    prompt = random_tokens(4, 9)
    steps = greedy(model, model.config, prompt, 3, ())
    for i, step in enumerate(steps):
        tokens = [*prompt, *(s.token for s in steps[:i])]
        best, second = oracle_logits(oracle, tokens)[-1].topk(2).values.tolist()
        assert step.gap == pytest.approx(best - second, abs=1e-4)


def test_an_end_token_is_the_last_step() -> None:
    model = model_of(twin())
    prompt = random_tokens(6, 12)
    free = [s.token for s in greedy(model, model.config, prompt, 8, ())]
    end = free[3]
    stopped = [s.token for s in greedy(model, model.config, prompt, 8, {end})]
    assert stopped == free[: free.index(end) + 1]


def test_no_tokens_are_asked_for_and_none_come() -> None:
    model = model_of(twin())
    assert greedy(model, model.config, (1, 2), 0, ()) == []


def test_smollm2_reference_equals_the_paged_runner() -> None:
    model, _ = smollm()
    prompt = random_tokens(8, 30, model.config.vocab_size)
    steps = greedy(model, model.config, prompt, 6, ())
    assert min(s.gap for s in steps) > 1e-3
    assert Bench(model, block_size=8).generate(prompt, 6) == [s.token for s in steps]


def test_reference_runs_in_bfloat16() -> None:
    model = model_of(twin(), torch.bfloat16)
    assert len(greedy(model, model.config, (1, 2, 3), 4, ())) == 4
