"""Whole steps of each policy: what a scheduler makes of decodes, chunks, layers and preemption."""

from dataclasses import replace

import pytest

from core.sampling import Sampling
from engine.policy.plan import LayerGroup, Plan
from engine.policy.policies.choose import POLICIES
from tests.property.paged_model import config, key, plain_loop
from tests.unit.bench_help import LONG, Bench, shape

ROOMY = config(chunk_tokens=8, layers=4, total_blocks=60, max_running=8, max_queued_tokens=1000)


def bench(policy: str, **changes: object) -> Bench:
    return Bench(replace(ROOMY, policy=policy, **changes))  # type: ignore[arg-type]


def depths(plan: Plan) -> list[tuple[str, LayerGroup | None]]:
    return [(work.key.request_id, work.layers) for work in plan.works]


def test_layered_sends_a_prompt_through_the_layers_while_decodes_go_on() -> None:
    made = bench("layered")
    made.submit("a", [1])
    made.step()
    made.submit("b", list(range(100, 110)))
    plans = [made.step()[0] for _ in range(3)]
    assert [shape(plan) for plan in plans] == [
        [("a", at, 1), ("b", 0, 10)] if at < 3 else [("a", 3, 1), ("b", 10, 1)] for at in (1, 2, 3)
    ]
    assert [depths(plan)[1][1] for plan in plans] == [
        LayerGroup(0, 2, 4),
        LayerGroup(2, 4, 4),
        None,
    ]
    assert [bool(plan.works[1].sample) for plan in plans] == [False, True, True]
    made.until_idle()
    assert made.tokens["b"] == plain_loop(list(range(100, 110)), LONG, ROOMY)[0]


def test_nobody_matches_the_blocks_of_a_prompt_between_two_layers() -> None:
    made = bench("layered")
    prompt = list(range(100, 112))
    made.submit("a", prompt, Sampling(max_tokens=1))
    made.step()
    made.submit("b", [*prompt, 1], Sampling(max_tokens=1))
    made.until_idle()
    assert made.report().cached_tokens_total == 12, "it waited, and has what the first computed"
    assert made.tokens["b"] == plain_loop([*prompt, 1], Sampling(max_tokens=1), ROOMY)[0]


def test_a_cancelled_prompt_between_two_layers_makes_way_and_can_come_again() -> None:
    made = bench("layered")
    made.submit("a", list(range(100, 116)))
    made.step()
    made.submit("b", [7])
    made.scheduler.cancel(key("a"))
    assert depths(made.step()[0]) == [("b", LayerGroup(0, 4, 4))]
    made.submit("a", list(range(100, 116)))
    assert depths(made.step()[0])[1] == ("a", LayerGroup(0, 1, 4))
    made.until_idle()
    assert made.tokens["a"] == plain_loop(list(range(100, 116)), LONG, ROOMY)[0]


def test_a_prompt_preempted_between_two_layers_starts_again_at_the_first() -> None:
    """It takes a step per layer, long enough for the older one to need its blocks."""
    made = bench("layered", layers=12, chunk_tokens=2, total_blocks=7, max_model_len=24)
    made.submit("old", [1, 2], Sampling(max_tokens=20, ignore_eos=True))
    made.step()
    made.submit("new", list(range(200, 216)), Sampling(max_tokens=2))
    starts, tokens = [], {}
    for _ in range(60):
        plan, _ = made.step()
        works = [work for work in plan.works if work.key == key("new")]
        starts += [work.layers.start for work in works if work.layers is not None]
        if made.count("preemptions") and not tokens:
            tokens = dict(made.tokens)
    assert made.count("preemptions") == 1
    assert "new" not in tokens, "it had not passed the last layer"
    assert starts[starts.index(0, 1) - 1] < 11
    assert made.tokens["new"] == plain_loop(list(range(200, 216)), Sampling(max_tokens=2))[0]
    assert made.report().free_blocks == 7


def test_prefill_first_lets_decodes_wait_and_chunks_never_mix_with_them() -> None:
    made = bench("prefill_first")
    made.submit("a", [1])
    made.step()
    made.submit("b", list(range(100, 120)))
    made.submit("c", list(range(200, 203)))
    assert shape(made.step()[0]) == [("b", 0, 20)]
    assert shape(made.step()[0]) == [("c", 0, 3)]
    assert shape(made.step()[0]) == [("a", 1, 1), ("b", 20, 1), ("c", 3, 1)]


def test_prefill_first_decodes_when_no_prompt_finds_blocks() -> None:
    made = bench("prefill_first", total_blocks=6, max_model_len=20)
    made.submit("a", list(range(100, 108)), Sampling(max_tokens=9, ignore_eos=True))
    made.step()
    made.submit("b", list(range(200, 216)), Sampling(max_tokens=2))
    assert shape(made.step()[0]) == [("a", 8, 1)]
    made.until_idle()
    assert set(made.tokens) == {"a", "b"}


def test_prepack_starts_a_later_short_prompt_in_the_step_of_the_oldest() -> None:
    made = bench("prepack")
    made.submit("a", [1, 2, 3])
    made.submit("b", [4, 5, 6, 7, 8, 9])
    made.submit("c", [10, 11, 12, 13, 14])
    assert shape(made.step()[0]) == [("a", 0, 3), ("c", 0, 5)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_large_prompt_is_not_overtaken_for_ever(policy: str) -> None:
    made = bench(policy, total_blocks=8, max_model_len=28)
    made.submit("first", list(range(100, 112)), Sampling(max_tokens=8, ignore_eos=True))
    made.step()
    made.submit("large", list(range(200, 220)), Sampling(max_tokens=2))
    for i in range(12):
        made.submit(f"small{i}", [300 + i], Sampling(max_tokens=2))
    made.until_idle()
    packed_before = 4 if policy == "prepack" else 0
    assert list(made.tokens).index("large") == 1 + packed_before


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_tokens_of_the_plain_loop_under_preemption(policy: str) -> None:
    made = bench(policy, total_blocks=9, max_model_len=28, max_running=4)
    prompts = {f"r{i}": list(range(100 * i, 100 * i + 3 + 4 * i)) for i in range(1, 5)}
    for name, prompt in prompts.items():
        made.submit(name, prompt)
    made.until_idle()
    assert made.count("preemptions") > 0
    for name, prompt in prompts.items():
        assert made.tokens[name] == plain_loop(prompt, LONG, made.config)[0]
    assert made.report().free_blocks == 9
