"""Order, budget, chunks, prefix reuse and preemption, seen through the plans of a scheduler."""

import pytest

from core.errors import InternalError
from core.messages import Fault, Prefill, PrefillDone, Reserve, StepEvents
from core.sampling import Sampling
from engine.policy.plan import Plan, Sampled
from engine.policy.scheduler import Scheduler
from tests.property.paged_model import CONFIG, config, key, plain_loop
from tests.unit.bench_help import LONG, Bench, shape


def test_a_prompt_is_computed_in_chunks_and_only_the_last_one_samples() -> None:
    bench = Bench(config(chunk_tokens=4))
    bench.submit("a", list(range(100, 110)))
    plans = [bench.step()[0] for _ in range(3)]
    assert [shape(p) for p in plans] == [[("a", 0, 4)], [("a", 4, 4)], [("a", 8, 2)]]
    assert [bool(p.works[0].sample) for p in plans] == [False, False, True]
    assert [len(p.works[0].block_ids) for p in plans] == [1, 2, 3]


def test_the_budget_is_shared_first_come_first_served() -> None:
    bench = Bench(config(chunk_tokens=6))
    bench.submit("a", list(range(100, 108)))
    bench.submit("b", list(range(200, 208)))
    assert shape(bench.step()[0]) == [("a", 0, 6)]
    assert shape(bench.step()[0]) == [("a", 6, 2), ("b", 0, 4)]


def test_decodes_come_first_and_prefill_gets_the_rest_of_the_budget() -> None:
    bench = Bench(config(chunk_tokens=4))
    bench.submit("a", [100, 101])
    bench.step()
    bench.submit("b", list(range(200, 208)))
    assert shape(bench.step()[0]) == [("a", 2, 1), ("b", 0, 3)]


def test_a_batch_of_decodes_as_large_as_the_budget_does_not_starve_prefill() -> None:
    bench = Bench(config(chunk_tokens=2, max_running=3))
    bench.submit("a", [100])
    bench.submit("b", [200])
    bench.step()
    bench.submit("c", [300, 301])
    assert shape(bench.step()[0]) == [("a", 1, 1), ("b", 1, 1), ("c", 0, 1)]


def test_no_more_than_max_running_sequences_decode() -> None:
    bench = Bench(config(max_running=2, chunk_tokens=64))
    for name in ("a", "b", "c"):
        bench.submit(name, [ord(name)], Sampling(max_tokens=3, ignore_eos=True))
    assert [w.key.request_id for w in bench.step()[0].works] == ["a", "b"]
    assert (bench.report().running, bench.report().waiting) == (2, 1)
    bench.until_idle()
    assert set(bench.tokens) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("length", "reused"),
    [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)],
    ids=["partial", "one-block", "one-block+1", "two-blocks", "two-blocks+1"],
)
def test_prefix_reuse_is_block_aligned_and_leaves_a_token_to_compute(
    length: int, reused: int
) -> None:
    bench = Bench(config(chunk_tokens=64))
    prompt = list(range(100, 100 + length))
    one = Sampling(max_tokens=1)
    bench.submit("cold", prompt, one)
    bench.step()
    bench.submit("warm", prompt, one)
    plan, output = bench.step()
    assert shape(plan) == [("warm", reused, length - reused)]
    (done,) = [event for _, event in output.events if isinstance(event, PrefillDone)]
    assert done.cached_tokens == reused
    assert bench.tokens["warm"] == bench.tokens["cold"]
    assert bench.report().cached_tokens_total == reused
    assert bench.report().prompt_tokens_total == 2 * length


def test_generated_tokens_are_cached_too() -> None:
    bench = Bench(config(chunk_tokens=64))
    bench.submit("a", [100, 101, 102], Sampling(max_tokens=6, ignore_eos=True))
    bench.until_idle()
    bench.submit("b", [100, 101, 102, *bench.tokens["a"][:5], 103])
    assert bench.step()[0].works[0].start == 8


def test_tenants_with_different_salts_share_nothing() -> None:
    bench = Bench(config(chunk_tokens=64))
    prompt = list(range(100, 110))
    bench.submit("a", prompt, Sampling(max_tokens=1), salt="one")
    bench.step()
    bench.submit("b", prompt, Sampling(max_tokens=1), salt="two")
    assert bench.step()[0].works[0].start == 0


def test_concurrent_prompts_share_blocks_once_they_are_computed() -> None:
    bench = Bench(config(chunk_tokens=9, total_blocks=30))
    prompt = list(range(100, 108))
    bench.submit("a", [*prompt, 1])
    bench.step()
    bench.submit("b", [*prompt, 2])
    plan, _ = bench.step()
    a, b = plan.works
    assert b.start == 8
    assert a.block_ids[:2] == b.block_ids[:2]


def test_when_blocks_run_out_the_latest_arrival_is_preempted_and_nobody_notices() -> None:
    bench = Bench(config(total_blocks=8, chunk_tokens=64, max_model_len=28, max_running=3))
    prompts = {name: [ord(name) + i for i in range(7)] for name in "abc"}
    for name, prompt in prompts.items():
        bench.submit(name, prompt)
    order: list[str] = []
    for _ in range(200):
        _, output = bench.step()
        for _, event in output.events:
            for token in event.events if isinstance(event, StepEvents) else ():
                order += [token.key.request_id] if token.finish else []
    assert bench.count("preemptions") >= 2
    assert order == ["a", "b", "c"]
    for name, prompt in prompts.items():
        assert bench.tokens[name] == plain_loop(prompt, LONG, bench.config)[0]
    assert bench.report().free_blocks == 8
    bench.submit("again", [*prompts["c"], *bench.tokens["c"]][:25])
    assert bench.step()[0].works[0].start == 24, "recomputed blocks are cached like others"


def test_a_newcomer_waits_rather_than_be_preempted_at_once() -> None:
    bench = Bench(config(total_blocks=6, chunk_tokens=64, max_model_len=20))
    bench.submit("a", list(range(100, 107)), Sampling(max_tokens=9, ignore_eos=True))
    bench.step()
    bench.submit("b", list(range(200, 216)), Sampling(max_tokens=3, ignore_eos=True))
    bench.until_idle()
    assert list(bench.tokens) == ["a", "b"]
    assert bench.count("preemptions") == 0


def test_a_prefill_for_another_worker_is_never_preempted() -> None:
    bench = Bench(config(total_blocks=7, chunk_tokens=2, max_model_len=20))
    bench.submit("a", list(range(100, 108)))
    for _ in range(4):
        bench.step()
    grant = Scheduler(CONFIG).reserve(Reserve(key("b"), tuple(range(200, 212))), "r", 0.0)
    job = Prefill(key("b"), tuple(range(200, 212)), LONG, grant=grant)
    bench.scheduler.prefill(job, "owner", bench.now)
    plans = [shape(bench.step()[0]) for _ in range(30)]
    at = [i for i, plan in enumerate(plans) if any(name == "b" for name, _, _ in plan)]
    assert at == list(range(at[0], at[-1] + 1)), "it never pauses"
    assert bench.count("preemptions") == 1


def test_a_preempted_sequence_is_announced_and_counted_once() -> None:
    bench = Bench(config(total_blocks=8, chunk_tokens=64, max_model_len=28))
    done = []
    for name in "abc":
        bench.submit(name, [ord(name) + i for i in range(7)])
    for _ in range(200):
        done += [e.key.request_id for _, e in bench.step()[1].events if isinstance(e, PrefillDone)]
    assert sorted(done) == ["a", "b", "c"]
    assert bench.report().prompt_tokens_total == 21


def test_a_preempted_sequence_starts_again_ahead_of_newer_work() -> None:
    bench = Bench(config(total_blocks=6, chunk_tokens=64, max_model_len=20, max_running=3))
    bench.submit("old", list(range(100, 108)))
    bench.submit("mid", list(range(200, 208)))
    bench.step()
    bench.submit("new", [300])
    starts: list[str] = []
    for _ in range(60):
        starts += [w.key.request_id for w in bench.step()[0].works if len(w.token_ids) > 1]
    assert bench.count("preemptions") >= 1
    assert starts == ["mid"], "recomputed, before the newcomer could take its blocks"
    assert list(bench.tokens) == ["old", "mid", "new"]


def test_a_large_prompt_is_not_overtaken_for_ever_by_small_ones() -> None:
    bench = Bench(config(total_blocks=8, chunk_tokens=64, max_model_len=28))
    bench.submit("first", list(range(100, 112)), Sampling(max_tokens=8, ignore_eos=True))
    bench.step()
    bench.submit("large", list(range(200, 220)), Sampling(max_tokens=2))
    for i in range(12):
        bench.submit(f"small{i}", [300 + i], Sampling(max_tokens=2))
    bench.until_idle()
    names = list(bench.tokens)
    assert names.index("large") == 1


def test_a_plan_must_be_committed_before_the_next_one() -> None:
    bench = Bench(config())
    bench.submit("a", [100])
    plan = bench.scheduler.plan(0.0)
    with pytest.raises(InternalError, match="not committed"):
        bench.scheduler.plan(0.0)
    with pytest.raises(InternalError, match="not the one"):
        bench.scheduler.commit(Plan(plan.works), [Sampled(1)], 0.0)
    with pytest.raises(InternalError, match="sampled"):
        bench.scheduler.commit(plan, [None], 0.0)


def test_a_failed_step_fails_its_own_sequences_only() -> None:
    bench = Bench(config(chunk_tokens=4))
    bench.submit("a", [100, 101, 102, 103])
    bench.submit("b", [200, 201])
    plan = bench.scheduler.plan(0.0)
    fault = Fault("internal_error", "the device is unwell")
    output = bench.scheduler.abandon(plan, fault, 1.0)
    ((owner, event),) = output.events
    assert (owner, event.key, event.fault.worker) == ("owner", key("a"), "w")
    bench.until_idle()
    assert bench.tokens["b"] == plain_loop([200, 201], LONG, bench.config)[0]
    assert bench.report().free_blocks == bench.config.total_blocks


def test_the_report_averages_step_times_and_shows_a_stuck_step() -> None:
    bench = Bench(config())
    bench.submit("a", [100])
    bench.step()
    bench.step()
    assert bench.report().step_ms == pytest.approx(500)
    assert bench.report().steps_total == 2
    bench.scheduler.plan(bench.now)
    assert bench.scheduler.report(bench.now + 9).step_ms == pytest.approx(9000)
