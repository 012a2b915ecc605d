"""Prompts that begin alike compute their common blocks once, and never wait for nothing."""

from dataclasses import replace

import pytest

from core.messages import Fault
from core.sampling import Sampling
from engine.policy.policies.choose import POLICIES
from tests.property.paged_model import config, key, plain_loop
from tests.unit.bench_help import LONG, Bench, shape

COMMON = list(range(100, 112))
ROOMY = config(chunk_tokens=64, total_blocks=60, max_running=8, max_queued_tokens=1000)
SHORT = Sampling(max_tokens=4, ignore_eos=True)


def test_a_batch_with_one_beginning_computes_it_once() -> None:
    bench = Bench(ROOMY)
    for i in range(4):
        bench.submit(f"r{i}", [*COMMON, 200 + i, 300 + i])
    assert shape(bench.step()[0]) == [("r0", 0, 14)]
    assert shape(bench.step()[0])[1:] == [("r1", 12, 2), ("r2", 12, 2), ("r3", 12, 2)]
    assert bench.report().cached_tokens_total == 3 * 12
    assert bench.count("shared_prefix_waits") == 3
    bench.until_idle()
    for i in range(4):
        assert bench.tokens[f"r{i}"] == plain_loop([*COMMON, 200 + i, 300 + i], LONG, ROOMY)[0]


def test_a_wait_ends_with_the_common_blocks_not_with_the_prompt() -> None:
    bench = Bench(config(chunk_tokens=8, total_blocks=60))
    bench.submit("long", list(range(100, 124)))
    bench.submit("short", [*range(100, 108), 500])
    assert shape(bench.step()[0]) == [("long", 0, 8)]
    assert shape(bench.step()[0]) == [("long", 8, 8)]
    assert shape(bench.step()[0]) == [("long", 16, 8)]
    assert bench.step()[0].works[1].start == 8


def test_equal_prompts_leave_each_other_the_block_they_must_compute() -> None:
    bench = Bench(ROOMY)
    bench.submit("a", COMMON)
    bench.submit("b", COMMON)
    assert shape(bench.step()[0]) == [("a", 0, 12)]
    assert shape(bench.step()[0]) == [("a", 12, 1), ("b", 8, 4)]


def test_prompts_that_share_less_than_a_block_or_nothing_do_not_wait() -> None:
    bench = Bench(ROOMY)
    bench.submit("a", [100, 101, 102, 1, 2, 3])
    bench.submit("b", [100, 101, 102, 4, 5, 6])
    bench.submit("c", [7])
    assert len(bench.step()[0].works) == 3
    assert bench.count("shared_prefix_waits") == 0


def test_other_tenants_do_not_wait_for_blocks_they_may_not_see() -> None:
    bench = Bench(ROOMY)
    bench.submit("a", COMMON, salt="one")
    bench.submit("b", COMMON, salt="two")
    assert len(bench.step()[0].works) == 2


@pytest.mark.parametrize("how", ["cancelled", "step_fails"])
def test_when_the_first_dies_the_next_takes_its_place(how: str) -> None:
    bench = Bench(config(chunk_tokens=8, total_blocks=60))
    for name in ("first", "second", "third"):
        bench.submit(name, [*COMMON, *COMMON[:6], ord(name[0])])
    plan = bench.scheduler.plan(0.0)
    if how == "cancelled":
        bench.scheduler.cancel(key("first"))
        bench.scheduler.commit(plan, bench.model.run(plan), 0.0)
    else:
        bench.scheduler.abandon(plan, Fault("internal_error", "no luck"), 0.0)
    assert shape(bench.step()[0])[0][0] == "second"
    bench.until_idle()
    assert set(bench.tokens) == {"second", "third"}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_group_is_served_to_the_end_among_others_by_every_policy(policy: str) -> None:
    bench = Bench(replace(ROOMY, policy=policy, chunk_tokens=8, max_running=2))
    prompts = {f"r{i}": [*COMMON, *range(200 + i, 203 + i)] for i in range(5)}
    prompts |= {f"other{i}": [300 + i] * (3 * i + 1) for i in range(4)}
    for name in sorted(prompts, key=lambda name: name[-1]):
        bench.submit(name, prompts[name], SHORT)
    bench.until_idle()
    expected = {name: plain_loop(prompt, SHORT)[0] for name, prompt in prompts.items()}
    assert bench.tokens == expected
    assert bench.report().cached_tokens_total >= 4 * 12
