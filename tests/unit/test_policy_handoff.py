"""Prefill for another worker, leases and attach, and every way in which they end early."""

import pytest

from core.errors import InternalError, LeaseGone, Refused, Stage
from core.ids import Epoch, LeaseId
from core.messages import (
    Attach,
    AttemptFailed,
    FinishReason,
    Grant,
    Prefill,
    PrefillDone,
    Reserve,
    StepEvents,
    WorkerReport,
)
from core.ports import StepOutput
from core.sampling import Sampling
from engine.policy.config import SchedulerConfig
from engine.policy.plan import Sampled
from engine.policy.scheduler import Scheduler
from tests.property.paged_model import CONFIG, PagedModel, config, key, plain_loop

PROMPT = list(range(100, 110))
LONG = Sampling(max_tokens=20, ignore_eos=True)
A = key("a")


class Bench:
    """One scheduler with its model and a clock."""

    def __init__(self, settings: SchedulerConfig = CONFIG) -> None:
        self.scheduler = Scheduler(settings)
        self.model = PagedModel(settings.total_blocks, settings.block_size)
        self.now = 0.0

    def step(self) -> StepOutput:
        plan = self.scheduler.plan(self.now)
        self.now += 1.0
        output = self.scheduler.commit(plan, self.model.run(plan), self.now)
        self.scheduler.check_integrity()
        return output

    def report(self) -> WorkerReport:
        return self.scheduler.report(self.now)

    def counter(self, name: str) -> int:
        return {c.name: c.value for c in self.report().counters}[name]


def lease(bench: Bench, tokens: list[int] = PROMPT) -> Grant:
    return bench.scheduler.reserve(Reserve(A, tuple(tokens)), "router", bench.now)


def send(bench: Bench, grant: Grant, sampling: Sampling = LONG) -> None:
    bench.scheduler.prefill(Prefill(A, tuple(PROMPT), sampling, grant=grant), "router", bench.now)


def fill(bench: Bench, grant: Grant, first: int, count: int, ok: bool = True) -> None:
    bench.scheduler.landing_begin(grant.lease_id, grant.epoch, first, count, bench.now)
    bench.scheduler.landing_end(grant.lease_id, first, count, ok, bench.now)


def attach(bench: Bench, grant: Grant, epoch: int = CONFIG.epoch) -> None:
    ask = Attach(A, grant.lease_id, Epoch(epoch), token=5, emitted=1, sampling=LONG)
    bench.scheduler.attach(ask, "router", bench.now)


def grant(bench: Bench | None = None) -> Grant:
    return lease(bench or Bench())


# ------------------------------------------------------------------------- the sending side


def test_blocks_are_ready_as_chunks_complete_and_the_last_brings_the_token() -> None:
    bench = Bench(config(chunk_tokens=5))
    send(bench, grant())
    first, second = bench.step(), bench.step()
    (early,) = first.ready
    assert (early.first_index, len(early.block_ids), early.last, early.first) == (0, 1, False, None)
    (late,) = second.ready
    assert (late.first_index, len(late.block_ids), late.last) == (1, 2, True)
    ((owner, tokens),) = second.events
    assert owner == "router"
    assert isinstance(tokens, StepEvents)
    assert late.first == tokens.events[0]
    assert late.first.token_ids == (plain_loop(PROMPT, LONG)[0][0],)
    assert (late.queue_s, late.prefill_s) == (0.0, 2.0)
    assert (bench.report().held, bench.report().lent_blocks) == (1, 3)


def test_cached_blocks_are_ready_with_the_first_chunk() -> None:
    bench = Bench(config(chunk_tokens=64, total_blocks=30))
    warm = Prefill(key("warm"), tuple(PROMPT), Sampling(max_tokens=1))
    bench.scheduler.prefill(warm, "router", 0.0)
    bench.step()
    send(bench, grant())
    (ready,) = bench.step().ready
    assert ready.cached_tokens == 8
    assert (ready.first_index, len(ready.block_ids)) == (0, 3)


def test_what_the_destination_has_is_not_sent() -> None:
    bench, there = Bench(config(chunk_tokens=5)), Bench()
    there.scheduler.prefill(Prefill(key("w"), tuple(PROMPT), Sampling(max_tokens=1)), "r", 0.0)
    there.step()
    there.step()
    granted = grant(there)
    assert (granted.blocks, granted.present_blocks) == (3, 2)
    send(bench, granted)
    assert bench.step().ready == ()
    (ready,) = bench.step().ready
    assert (ready.first_index, len(ready.block_ids), ready.last) == (2, 1, True)


def test_a_destination_that_has_everything_gets_an_empty_last_message() -> None:
    bench, there = Bench(config(chunk_tokens=64)), Bench(config(chunk_tokens=64))
    prompt = PROMPT[:8]
    there.scheduler.prefill(Prefill(key("w"), tuple(prompt), Sampling(max_tokens=1)), "r", 0.0)
    there.step()
    granted = lease(there, prompt)
    assert (granted.blocks, granted.present_blocks) == (2, 2)
    job = Prefill(A, tuple(prompt), LONG, grant=granted)
    bench.scheduler.prefill(job, "router", 0.0)
    (ready,) = bench.step().ready
    assert (ready.first_index, ready.block_ids, ready.last) == (2, (), True)
    bench.scheduler.moved(A, (), last=True)
    assert not bench.scheduler.holds(A)
    attach(there, granted)
    assert there.report().running == 1


def test_a_first_token_that_ends_the_request_needs_no_hand_over() -> None:
    bench = Bench(config(chunk_tokens=5))
    send(bench, grant(), Sampling(max_tokens=1))
    (early,) = bench.step().ready
    output = bench.step()
    assert output.ready == ()
    (owner, done), (_, tokens) = output.events
    assert isinstance(tokens, StepEvents)
    assert isinstance(done, PrefillDone)
    assert owner == "router"
    assert done.first == tokens.events[0]
    assert done.first.finish is FinishReason.LENGTH
    assert not bench.scheduler.holds(A)
    assert bench.report().lent_blocks == 1, "the mover still reads the early block"
    bench.scheduler.moved(A, early.block_ids, last=False)
    assert bench.report().free_blocks == CONFIG.total_blocks


def test_a_cancel_leaves_lent_blocks_with_the_mover() -> None:
    bench = Bench(config(chunk_tokens=64))
    send(bench, grant())
    (ready,) = bench.step().ready
    assert bench.scheduler.cancel(A)
    assert not bench.scheduler.cancel(A)
    assert (bench.report().held, bench.report().lent_blocks) == (0, 3)
    assert bench.report().free_blocks == CONFIG.total_blocks - 3
    with pytest.raises(Refused, match="here already"):
        send(bench, grant())
    bench.scheduler.moved(A, ready.block_ids, last=True)
    bench.scheduler.moved(A, ready.block_ids, last=True)
    assert bench.report().free_blocks == CONFIG.total_blocks


def test_a_cancel_during_a_step_gives_blocks_back_after_it() -> None:
    bench = Bench(config(chunk_tokens=64))
    send(bench, grant())
    plan = bench.scheduler.plan(0.0)
    assert bench.scheduler.cancel(A)
    assert bench.report().free_blocks == CONFIG.total_blocks - 3
    assert bench.scheduler.commit(plan, [Sampled(1)], 1.0) == StepOutput()
    assert bench.report().free_blocks == CONFIG.total_blocks
    assert bench.report().cached_blocks == 0


def test_a_key_cancelled_and_used_again_during_a_step_is_a_new_attempt() -> None:
    bench = Bench(config(chunk_tokens=64))
    send(bench, grant())
    plan = bench.scheduler.plan(0.0)
    bench.scheduler.cancel(A)
    bench.scheduler.prefill(Prefill(A, (1, 2), LONG), "router", 0.0)
    assert bench.scheduler.commit(plan, [Sampled(1)], 1.0) == StepOutput()
    _, (_, tokens) = bench.step().events
    assert isinstance(tokens, StepEvents)
    assert tokens.events[0].token_ids == (plain_loop([1, 2], LONG)[0][0],)


# ----------------------------------------------------------------------- the receiving side


def test_a_filled_lease_becomes_a_running_sequence() -> None:
    bench = Bench()
    granted = lease(bench)
    fill(bench, granted, 0, 2)
    fill(bench, granted, 2, 1)
    assert bench.report().leased_blocks == 3
    attach(bench, granted)
    report = bench.report()
    assert (report.leased_blocks, report.running, report.running_tokens) == (0, 1, 11)
    assert report.cached_blocks == 2, "its full blocks can be matched"
    (work,) = bench.scheduler.plan(0.0).works
    assert (work.token_ids, work.start, len(work.block_ids)) == ((5,), 10, 3)
    assert work.sample is not None
    assert work.sample.index == 1


def test_an_attached_sequence_that_is_recomputed_counts_no_prompt_tokens_here() -> None:
    bench = Bench(config(total_blocks=7, chunk_tokens=64, max_model_len=24))
    bench.scheduler.prefill(Prefill(key("old"), (1, 2, 3, 4, 5, 6, 7), LONG), "r", 0.0)
    bench.step()
    granted = lease(bench)
    fill(bench, granted, 0, 3)
    attach(bench, granted)
    kinds = [type(e) for _ in range(40) for _, e in bench.step().events]
    assert bench.counter("preemptions") == 1
    assert PrefillDone not in kinds
    assert bench.report().prompt_tokens_total == 7


@pytest.mark.parametrize("landed", [[], [(0, 1)], [(0, 2)], [(1, 2)]], ids=str)
def test_a_lease_with_a_hole_cannot_be_attached(landed: list[tuple[int, int]]) -> None:
    bench = Bench()
    granted = lease(bench)
    for first, count in landed:
        fill(bench, granted, first, count)
    with pytest.raises(LeaseGone, match="of 3 blocks") as caught:
        attach(bench, granted)
    assert caught.value.stage is Stage.ATTACH
    assert bench.scheduler.holds(A), "it may still be filled"


def test_a_failed_write_leaves_a_hole_that_may_be_tried_again() -> None:
    bench = Bench()
    granted = lease(bench)
    fill(bench, granted, 0, 3, ok=False)
    with pytest.raises(LeaseGone):
        attach(bench, granted)
    fill(bench, granted, 0, 3)
    attach(bench, granted)


@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 1), (0, 3), (1, 1), (2, 2), (3, 1), (-1, 1), (2, 0)],
    ids=["landed", "over-landed", "being-written", "too-long", "outside", "negative", "empty"],
)
def test_a_place_is_written_at_most_once(first: int, count: int) -> None:
    bench = Bench()
    granted = lease(bench)
    fill(bench, granted, 0, 1)
    bench.scheduler.landing_begin(granted.lease_id, granted.epoch, 1, 1, 0.0)
    with pytest.raises(LeaseGone, match="do not send them again"):
        bench.scheduler.landing_begin(granted.lease_id, granted.epoch, first, count, 0.0)


def test_present_blocks_are_shared_hence_never_written() -> None:
    bench = Bench(config(chunk_tokens=64))
    bench.scheduler.prefill(Prefill(key("w"), tuple(PROMPT), Sampling(max_tokens=1)), "r", 0.0)
    bench.step()
    granted = lease(bench)
    assert granted.present_blocks == 2
    with pytest.raises(LeaseGone):
        bench.scheduler.landing_begin(granted.lease_id, granted.epoch, 1, 2, 0.0)
    fill(bench, granted, 2, 1)
    attach(bench, granted)


@pytest.mark.parametrize("epoch", [CONFIG.epoch - 1, CONFIG.epoch + 1])
def test_another_epoch_is_fenced(epoch: int) -> None:
    bench = Bench()
    granted = lease(bench)
    with pytest.raises(LeaseGone, match=f"of epoch {epoch}"):
        bench.scheduler.landing_begin(granted.lease_id, Epoch(epoch), 0, 3, 0.0)
    fill(bench, granted, 0, 3)
    with pytest.raises(LeaseGone, match=f"of epoch {epoch}"):
        attach(bench, granted, epoch)
    attach(bench, granted)


def test_a_lease_that_ends_under_a_write_is_quarantined_until_the_write_reports() -> None:
    bench = Bench()
    granted = lease(bench)
    for place in (0, 1):
        bench.scheduler.landing_begin(granted.lease_id, granted.epoch, place, 1, 0.0)
    assert bench.scheduler.cancel(A)
    assert not bench.scheduler.holds(A)
    assert bench.report().quarantined_blocks == 3
    for place, left in ((0, 3), (1, 0)):
        with pytest.raises(LeaseGone):
            bench.scheduler.landing_begin(granted.lease_id, granted.epoch, 2, 1, 0.0)
        bench.scheduler.landing_end(granted.lease_id, place, 1, True, 0.0)
        assert bench.report().quarantined_blocks == left
        bench.scheduler.check_integrity()
    assert bench.report().free_blocks == CONFIG.total_blocks
    assert bench.counter("quarantined_total") == 3


def test_an_end_that_nobody_began_is_an_internal_error() -> None:
    bench = Bench()
    granted = lease(bench)
    with pytest.raises(InternalError, match="nobody began"):
        bench.scheduler.landing_end(granted.lease_id, 0, 1, True, 0.0)
    with pytest.raises(InternalError, match="nobody began"):
        bench.scheduler.landing_end(LeaseId("no such"), 0, 1, True, 0.0)


def test_the_sender_can_give_a_lease_up() -> None:
    bench = Bench()
    granted = lease(bench)
    assert not bench.scheduler.abort_lease(A, LeaseId("another"))
    assert bench.scheduler.abort_lease(A, granted.lease_id)
    assert not bench.scheduler.abort_lease(A, granted.lease_id)
    assert bench.counter("leases_aborted") == 1
    assert bench.report().free_blocks == CONFIG.total_blocks


def test_a_draining_worker_still_takes_the_attach_it_promised() -> None:
    bench = Bench()
    granted = lease(bench)
    fill(bench, granted, 0, 3)
    bench.scheduler.drain()
    attach(bench, granted)
    assert bench.report().running == 1


# ------------------------------------------------------------------------ renewal and expiry


def failures(output: StepOutput) -> list[tuple[str, str, Stage]]:
    return [
        (str(e.key), e.fault.code, e.fault.stage)
        for _, e in output.events
        if isinstance(e, AttemptFailed)
    ]


def test_what_nobody_renews_is_dropped_and_the_owner_is_told_once() -> None:
    bench = Bench(config(chunk_tokens=64))
    bench.scheduler.prefill(Prefill(key("run"), (1, 2), LONG), "router", 0.0)
    send_to = lease(Bench())
    bench.scheduler.prefill(Prefill(key("held"), tuple(PROMPT), LONG, grant=send_to), "router", 0.0)
    bench.step()
    bench.scheduler.prefill(Prefill(key("wait"), (3,), LONG), "router", 0.0)
    bench.scheduler.reserve(Reserve(key("lease"), (4,)), "router", 0.0)
    assert bench.scheduler.expire(10.0) == StepOutput()
    bench.scheduler.renew([key("wait"), key("lease"), key("unknown")], "router", 10.0)
    bench.scheduler.renew([key("run"), key("held")], "stranger", 10.0)
    assert failures(bench.scheduler.expire(10.5)) == [
        ("run#1", "deadline_exceeded", Stage.DECODE),
        ("held#1", "deadline_exceeded", Stage.TRANSFER),
    ]
    assert failures(bench.scheduler.expire(20.5)) == [
        ("wait#1", "deadline_exceeded", Stage.QUEUE),
        ("lease#1", "lease_gone", Stage.RESERVE),
    ]
    assert bench.scheduler.expire(99.0) == StepOutput()
    assert (bench.counter("expired"), bench.counter("leases_expired")) == (3, 1)
    assert bench.report().lent_blocks == 3


def test_progress_renews_a_lease_and_one_under_write_never_expires() -> None:
    bench = Bench()
    granted = lease(bench)
    bench.scheduler.landing_begin(granted.lease_id, granted.epoch, 0, 1, 9.0)
    assert bench.scheduler.expire(1000.0) == StepOutput()
    bench.scheduler.landing_end(granted.lease_id, 0, 1, True, 1000.0)
    assert bench.scheduler.expire(1010.0) == StepOutput()
    assert len(bench.scheduler.expire(1010.5).events) == 1


def test_an_overdue_lease_is_not_revived_by_a_late_write() -> None:
    bench = Bench()
    granted = lease(bench)
    with pytest.raises(LeaseGone, match="not renewed"):
        bench.scheduler.landing_begin(granted.lease_id, granted.epoch, 0, 1, 10.5)
    assert len(bench.scheduler.expire(10.5).events) == 1


def test_a_lost_session_drops_all_it_owned_and_nothing_else() -> None:
    bench = Bench()
    bench.scheduler.prefill(Prefill(key("mine"), (1,), LONG), "one", 0.0)
    bench.scheduler.reserve(Reserve(key("lease"), (1,)), "one", 0.0)
    bench.scheduler.prefill(Prefill(key("other"), (1,), LONG), "two", 0.0)
    assert bench.scheduler.drop_owner("one") == 2
    assert bench.scheduler.drop_owner("one") == 0
    assert bench.scheduler.holds(key("other"))
    assert bench.counter("cancelled") == 2


def test_one_message_per_owner_and_step() -> None:
    bench = Bench(config(chunk_tokens=64))
    for name, owner in (("a", "one"), ("b", "two"), ("c", "one")):
        bench.scheduler.prefill(Prefill(key(name), (1, 2), LONG), owner, 0.0)
    bench.step()
    batches = {o: e for o, e in bench.step().events if isinstance(e, StepEvents)}
    assert [t.key.request_id for t in batches["one"].events] == ["a", "c"]
    assert [t.key.request_id for t in batches["two"].events] == ["b"]
    assert [t.index for t in batches["one"].events] == [1, 1]


def test_only_its_owner_or_the_worker_itself_cancels_an_attempt() -> None:
    bench = Bench(config(chunk_tokens=64))
    send(bench, grant())
    assert not bench.scheduler.cancel(A, "a stranger")
    assert bench.scheduler.holds(A)
    assert bench.scheduler.cancel(A, "router")
    assert not bench.scheduler.holds(A)
