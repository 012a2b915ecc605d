"""What a worker refuses, in what words, and that a refusal holds nothing."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from core.errors import BadRequest, Incompatible, Refused, Stage
from core.ids import AttemptKey, LeaseId
from core.messages import Attach, Grant, Prefill, Reserve
from core.sampling import BadWord, LogitBias, Sampling
from engine.policy.plan import Sampled
from engine.policy.scheduler import Scheduler
from tests.property.paged_model import CONFIG, VOCABULARY, config, key

LONG = Sampling(max_tokens=100)


def reserve(scheduler: Scheduler, name: str, tokens: int) -> Grant:
    return scheduler.reserve(Reserve(key(name), tuple(range(tokens))), "owner", 0.0)


def prefill(scheduler: Scheduler, name: str, tokens: int, grant: Grant | None = None) -> None:
    job = Prefill(key(name), tuple(range(tokens)), LONG, grant=grant)
    scheduler.prefill(job, "owner", 0.0)


def grant_for(name: str, blocks: int, present: int = 0) -> Grant:
    scheduler = Scheduler(CONFIG)
    return replace(reserve(scheduler, name, 4), blocks=blocks, present_blocks=present)


def refused(scheduler: Scheduler) -> int:
    return {c.name: c.value for c in scheduler.report(0.0).counters}["refused"]


def test_a_grant_says_where_and_how_much() -> None:
    grant = reserve(Scheduler(CONFIG), "a", 9)
    assert (grant.key, grant.epoch, grant.worker_id) == (key("a"), 7, "w")
    assert (grant.address, grant.blocks, grant.present_blocks) == ("127.0.0.1:1", 3, 0)


def test_leases_leave_one_block_free() -> None:
    scheduler = Scheduler(config(total_blocks=6, max_model_len=20))
    reserve(scheduler, "a", 16)
    with pytest.raises(Refused, match="no room for 2 blocks: 2 are free") as caught:
        reserve(scheduler, "b", 5)
    assert caught.value.retry_after_s > 0
    assert (caught.value.stage, caught.value.worker) == (Stage.RESERVE, "w")
    assert reserve(scheduler, "c", 4).blocks == 1
    assert refused(scheduler) == 1
    scheduler.check_integrity()


@pytest.mark.parametrize("ask", [reserve, prefill], ids=["reserve", "prefill"])
@pytest.mark.parametrize(
    ("tokens", "fits"), [(19, True), (20, False), (30, False)], ids=["19", "20", "30"]
)
def test_what_can_never_fit_is_the_requests_fault_and_both_numbers_are_named(
    ask: Callable[..., object], tokens: int, fits: bool
) -> None:
    scheduler = Scheduler(config(total_blocks=6, max_model_len=1000))
    if fits:
        ask(scheduler, "a", tokens)
        return
    with pytest.raises(BadRequest, match=rf"{tokens} tokens .* may have 20 tokens") as caught:
        ask(scheduler, "a", tokens)
    assert caught.value.field == "prompt"


def test_the_model_length_counts_too() -> None:
    scheduler = Scheduler(config(max_model_len=8))
    prefill(scheduler, "a", 7)
    with pytest.raises(BadRequest, match="model length 8"):
        prefill(scheduler, "b", 8)


def test_a_queue_that_is_full_refuses_but_an_idle_worker_takes_anything() -> None:
    scheduler = Scheduler(config(max_queued_tokens=10))
    prefill(scheduler, "a", 30)
    with pytest.raises(Refused, match="30 tokens are queued"):
        prefill(scheduler, "b", 1)
    scheduler.cancel(key("a"))
    prefill(scheduler, "b", 9)
    prefill(scheduler, "c", 1)


def test_a_draining_worker_refuses_new_work() -> None:
    scheduler = Scheduler(CONFIG)
    scheduler.drain()
    for ask in (reserve, prefill):
        with pytest.raises(Refused, match="draining"):
            ask(scheduler, "a", 4)
    assert scheduler.report(0.0).draining


@pytest.mark.parametrize("first", [reserve, prefill], ids=["lease", "job"])
@pytest.mark.parametrize("second", [reserve, prefill], ids=["reserve", "prefill"])
def test_a_key_names_one_thing(first: Callable[..., object], second: Callable[..., object]) -> None:
    scheduler = Scheduler(CONFIG)
    first(scheduler, "a", 4)
    with pytest.raises(Refused, match="a#1 is here already"):
        second(scheduler, "a", 4)
    second(scheduler, "b", 4)


def test_leases_and_waiting_jobs_take_the_slots_of_running_sequences() -> None:
    scheduler = Scheduler(config(max_running=3))
    reserve(scheduler, "a", 1)
    prefill(scheduler, "b", 1)
    reserve(scheduler, "c", 1)
    with pytest.raises(Refused, match="all 3 sequences are taken"):
        reserve(scheduler, "d", 1)


def test_a_newcomer_gets_only_what_waiting_sequences_leave() -> None:
    scheduler = Scheduler(config(total_blocks=8, max_model_len=28, max_running=9))
    prefill(scheduler, "a", 20)
    with pytest.raises(Refused, match="5 of them promised"):
        reserve(scheduler, "b", 12)
    assert reserve(scheduler, "c", 8).blocks == 2


def test_prefill_waits_for_movers_once_half_the_pool_is_lent() -> None:
    scheduler = Scheduler(config(total_blocks=6, chunk_tokens=64))
    prefill(scheduler, "a", 13, grant_for("a", blocks=4))
    plan = scheduler.plan(0.0)
    (ready,) = scheduler.commit(plan, [Sampled(100)], 1.0).ready
    with pytest.raises(Refused, match="4 of 6 blocks wait to be moved"):
        prefill(scheduler, "b", 1)
    scheduler.moved(key("a"), ready.block_ids[:1], last=False)
    prefill(scheduler, "b", 1)


@pytest.mark.parametrize(
    ("job", "field"),
    [
        (Prefill(key("a"), (), LONG), "prompt"),
        (Prefill(key("a"), (1, -1), LONG), "prompt"),
        (Prefill(key("a"), (1, VOCABULARY), LONG), "prompt"),
        (Prefill(key("a"), (1, 2), LONG, emitted=2), "emitted"),
        (Prefill(key("a"), (1, 2), LONG, emitted=-1), "emitted"),
        (Prefill(key("a"), (1, 2), Sampling(max_tokens=1), emitted=1), "max_tokens"),
    ],
    ids=[
        "empty",
        "negative-id",
        "unknown-id",
        "all-emitted",
        "negative-emitted",
        "nothing-left",
    ],
)
def test_an_impossible_job_is_refused_by_field(job: Prefill, field: str) -> None:
    scheduler = Scheduler(CONFIG)
    with pytest.raises(BadRequest) as caught:
        scheduler.prefill(job, "owner", 0.0)
    assert caught.value.field == field
    assert not scheduler.holds(job.key)


BEYOND = VOCABULARY
UNFIT = {
    "unknown-stop-token": {"stop_token_ids": (1, BEYOND)},
    "unknown-biased-token": {"logit_bias": (LogitBias(BEYOND, 1.0),)},
    "endless-bias": {"logit_bias": (LogitBias(1, float("inf")),)},
    "unknown-bad-word": {"bad_words": (BadWord((1, BEYOND)),)},
    "empty-bad-word": {"bad_words": (BadWord(()),)},
    "negative-temperature": {"temperature": -0.1},
    "no-number": {"temperature": float("nan")},
    "top-p": {"top_p": 1.1},
    "min-p": {"min_p": -0.1},
    "more-than-max": {"min_tokens": 101},
    "no-repetition": {"repetition_penalty": 0.0},
    "presence": {"presence_penalty": float("nan")},
    "frequency": {"frequency_penalty": float("-inf")},
    "logprobs": {"logprobs": -1},
}


@pytest.mark.parametrize("changes", UNFIT.values(), ids=UNFIT)
def test_sampling_that_no_step_can_follow_is_refused_by_field(changes: dict[str, object]) -> None:
    """By both calls that bring it, so that neither can take a whole batch down."""
    sampling = replace(LONG, **changes)  # type: ignore[arg-type]
    scheduler = Scheduler(CONFIG)
    job = Prefill(key("a"), (1, 2), sampling)
    attach = Attach(key("a"), LeaseId("l"), CONFIG.epoch, 1, 1, sampling)
    for call, message in ((scheduler.prefill, job), (scheduler.attach, attach)):
        with pytest.raises(BadRequest) as caught:
            call(message, "owner", 0.0)  # type: ignore[operator]
        assert caught.value.field == next(iter(changes))
    assert not scheduler.holds(key("a"))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"token": VOCABULARY}, "prompt"),
        ({"emitted": 0}, "emitted"),
        ({"emitted": 100}, "max_tokens"),
    ],
    ids=["unknown-id", "nothing-emitted", "nothing-left"],
)
def test_an_impossible_attach_keeps_the_lease(changes: dict[str, int], field: str) -> None:
    scheduler = Scheduler(config(max_model_len=1000, total_blocks=200))
    grant = reserve(scheduler, "a", 4)
    scheduler.landing_begin(grant.lease_id, grant.epoch, 0, 1, 0.0)
    scheduler.landing_end(grant.lease_id, 0, 1, True, 0.0)
    good = Attach(AttemptKey("a", 1), grant.lease_id, grant.epoch, 5, 1, LONG)  # type: ignore[arg-type]
    with pytest.raises(BadRequest) as caught:
        scheduler.attach(replace(good, **changes), "owner", 0.0)  # type: ignore[arg-type]
    assert caught.value.field == field
    scheduler.attach(good, "owner", 0.0)
    assert scheduler.report(0.0).running == 1


@pytest.mark.parametrize(("blocks", "present"), [(2, 0), (1, 2)], ids=["size", "present"])
def test_a_grant_that_does_not_fit_comes_from_another_layout(blocks: int, present: int) -> None:
    job = Prefill(key("a"), (1, 2), LONG, grant=grant_for("a", blocks, present))
    with pytest.raises(Incompatible) as caught:
        Scheduler(CONFIG).prefill(job, "owner", 0.0)
    assert caught.value.field == "layout.block_size"
