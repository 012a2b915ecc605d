"""Sampling through scheduler and runner: retries go on as if nothing had happened, and log
probabilities are those of one plain forward."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch

from core.messages import Prefill, StepEvents, TokenEvent
from core.sampling import BadWord, LogitBias, Sampling
from engine.device.backend import TorchBackend
from engine.device.pool import KVPool
from engine.device.runner import Runner, kv_layout
from engine.model.decoder import Decoder
from engine.policy.scheduler import Scheduler
from tests.property.paged_model import CONFIG, key
from tests.unit.llama_help import model_of, oracle_logits, random_tokens, twin

COUNT = 24
PROMPT = random_tokens(5, 20)
EOS = 96
STEERED = Sampling(
    temperature=1.3,
    min_p=0.02,
    seed=77,
    max_tokens=COUNT,
    min_tokens=COUNT,
    stop_token_ids=tuple(range(0, 97, 5)),
    repetition_penalty=1.4,
    presence_penalty=0.8,
    frequency_penalty=0.5,
    logit_bias=(LogitBias(11, 2.5), LogitBias(12, -3.0)),
    logprobs=2,
)


@cache
def model() -> Decoder:
    return model_of(twin(eos_token_id=EOS))


def generate(job: Prefill, chunk: int = 512) -> list[TokenEvent]:
    """All token events of one attempt on a worker of its own."""
    layout = kv_layout(model().config, 4, "float32")
    pool = KVPool(layout, 40, memoryview(bytearray(40 * layout.block_bytes)))
    runner = Runner(model(), pool, TorchBackend.of(torch.float32))
    facts = {"vocab_size": 97, "eos_ids": frozenset((EOS,)), "max_model_len": 1024}
    scheduler = Scheduler(replace(CONFIG, total_blocks=40, chunk_tokens=chunk, **facts))
    scheduler.prefill(job, "owner", 0.0)
    events: list[TokenEvent] = []
    for _ in range(len(job.tokens) + COUNT + 1):
        plan = scheduler.plan(0.0)
        out = scheduler.commit(plan, runner.run(plan), 0.0)
        events += [e for _, step in out.events if isinstance(step, StepEvents) for e in step.events]
    return events


def tokens(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


@cache
def whole() -> list[TokenEvent]:
    return generate(Prefill(key("r"), PROMPT, STEERED))


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("emitted", [1, 7, COUNT - 1])
def test_a_second_attempt_goes_on_identically(emitted: int, temperature: float) -> None:
    """It knows its outputs from its prompt by number alone, in whatever chunks it is computed."""
    sampling = replace(STEERED, temperature=temperature)
    first = generate(Prefill(key("r"), PROMPT, sampling))
    said = tokens(first)
    again = generate(Prefill(key("r", 2), (*PROMPT, *said[:emitted]), sampling, emitted), chunk=7)
    assert tokens(again) == said[emitted:]
    assert [event.index for event in again] == list(range(emitted, COUNT))
    for one, other in zip(first[emitted:], again, strict=True):
        assert one.logprobs[0].logprob == pytest.approx(other.logprobs[0].logprob, abs=1e-4)


def test_each_steering_field_makes_a_difference_here() -> None:
    """Otherwise the test above would not show that it is carried over."""
    said = tokens(whole())
    for neutral in (
        {"repetition_penalty": 1.0},
        {"presence_penalty": 0.0},
        {"frequency_penalty": 0.0},
        {"logit_bias": ()},
        {"stop_token_ids": ()},
        {"min_p": 0.5},
    ):
        assert tokens(generate(Prefill(key("r"), PROMPT, replace(STEERED, **neutral)))) != said


def test_a_bad_word_never_comes_to_be() -> None:
    said = tokens(generate(Prefill(key("r"), PROMPT, Sampling(max_tokens=COUNT))))
    pairs = tuple(BadWord(pair) for pair in pairwise(said))
    banned = Sampling(max_tokens=COUNT, bad_words=(*pairs, BadWord((PROMPT[-1], said[0]))))
    other = tokens(generate(Prefill(key("r"), PROMPT, banned)))
    line = (PROMPT[-1], *other)
    assert not {w.token_ids for w in banned.bad_words} & set(pairwise(line))


def test_min_tokens_put_off_the_end_of_sequence() -> None:
    eager = Sampling(max_tokens=COUNT, logit_bias=(LogitBias(EOS, 1e4),))
    assert tokens(generate(Prefill(key("r"), PROMPT, eager))) == [EOS]
    said = tokens(generate(Prefill(key("r"), PROMPT, replace(eager, min_tokens=5))))
    assert (len(said), said[5:], EOS in said[:5]) == (6, [EOS], False)


def test_logprobs_are_those_of_one_plain_forward_of_transformers() -> None:
    said = tokens(whole())
    plain = oracle_logits(twin(), (*PROMPT, *said)).log_softmax(-1)
    for row, event in enumerate(whole(), len(PROMPT) - 1):
        (token,), (told,) = event.token_ids, event.logprobs
        assert told.logprob == pytest.approx(plain[row, token].item(), abs=1e-4)
        values, ids = plain[row].topk(2)
        assert [t.token for t in told.top] == ids.tolist()
        assert [t.logprob for t in told.top] == pytest.approx(values.tolist(), abs=1e-4)
