"""Waiting for a grammar to be compiled is a state: others go on, and whoever waits in vain ends."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import BadRequest, DeadlineExceeded, Stage, TriremeError
from core.messages import Attach, AttemptFailed, Prefill, Reserve
from core.sampling import Grammar, GrammarKind, Sampling
from engine.policy.grammars import PENDING, READY, GrammarState
from tests.property.paged_model import CONFIG, config, key, plain_loop
from tests.unit.bench_help import LONG, Bench, shape

A, B = (Grammar(GrammarKind.REGEX, source) for source in "ab")
RULED = replace(LONG, grammar=A)
ROOMY = config(chunk_tokens=64, total_blocks=64)


class Grammars:
    """A port that says what the test tells it to; pending until then."""

    def __init__(self) -> None:
        self.states: dict[Grammar, GrammarState] = {}
        self.asked: list[Grammar] = []

    def state(self, grammar: Grammar, now: float) -> GrammarState:
        self.asked.append(grammar)
        return self.states.get(grammar, PENDING)


def bench_of(grammars: Grammars) -> Bench:
    return Bench(ROOMY, grammars)


def failures(bench: Bench) -> list[tuple[str, AttemptFailed]]:
    return [e for e in bench.scheduler.expire(bench.now).events if isinstance(e[1], AttemptFailed)]


def test_others_overtake_a_sequence_whose_grammar_is_on_its_way() -> None:
    grammars = Grammars()
    bench = bench_of(grammars)
    bench.submit("a", [100, 101], RULED)
    bench.submit("b", [200, 201])
    assert shape(bench.step()[0]) == [("b", 0, 2)]
    assert (bench.report().waiting, bench.report().running) == (1, 1)
    grammars.states[A] = READY
    assert shape(bench.step()[0]) == [("b", 2, 1), ("a", 0, 2)]
    bench.until_idle()
    assert bench.tokens["a"] == plain_loop([100, 101], RULED, ROOMY)[0]


def test_nobody_else_is_asked_about() -> None:
    grammars = Grammars()
    bench = bench_of(grammars)
    bench.submit("b", [200, 201])
    bench.step()
    assert not grammars.asked


@pytest.mark.parametrize("error", [BadRequest("no such regex"), DeadlineExceeded("too late")])
def test_a_grammar_that_cannot_be_had_ends_its_sequence_once(error: TriremeError) -> None:
    grammars = Grammars()
    bench = bench_of(grammars)
    bench.submit("a", [100], RULED)
    bench.submit("b", [200])
    bench.step()
    assert not failures(bench)
    grammars.states[A] = GrammarState(error=error)
    bench.step()
    bench.step()
    ((owner, event),) = failures(bench)
    assert (owner, event.key, event.fault.code) == ("owner", key("a"), error.code)
    assert event.fault.worker == CONFIG.worker_id
    assert not bench.scheduler.holds(key("a"))
    assert bench.count("grammars_failed") == 1
    bench.step()
    assert not failures(bench)
    assert len(bench.tokens["b"]) == 4


def test_a_worker_without_grammars_says_so() -> None:
    bench = Bench(ROOMY)
    bench.submit("a", [100], RULED)
    bench.step()
    ((_, event),) = failures(bench)
    assert (event.fault.code, event.fault.field) == ("bad_request", "response_format")


def test_a_waiting_sequence_can_be_cancelled_and_expires() -> None:
    grammars = Grammars()
    bench = bench_of(grammars)
    for name in "ab":
        bench.submit(name, [100], RULED)
    bench.step()
    assert bench.scheduler.cancel(key("a"))
    bench.now += CONFIG.lease_s + 1
    ((_, event),) = failures(bench)
    assert (event.key, event.fault.stage) == (key("b"), Stage.QUEUE)
    grammars.states[A] = READY
    assert not bench.step()[0].works
    assert bench.report().free_blocks == ROOMY.total_blocks


def test_cancelled_between_its_grammars_failure_and_the_step_it_is_not_told_of() -> None:
    grammars = Grammars()
    bench = bench_of(grammars)
    grammars.states[A] = GrammarState(error=BadRequest("no"))
    bench.submit("a", [100], RULED)
    bench.submit("b", [200])
    bench.step()
    bench.scheduler.cancel(key("a"))
    assert not failures(bench)


def test_a_handed_over_sequence_waits_on_its_new_worker_and_keeps_its_blocks() -> None:
    grammars = Grammars()
    bench = bench_of(grammars)
    prompt = list(range(100, 108))
    grant = bench.scheduler.reserve(Reserve(key("a"), tuple(prompt)), "owner", 0.0)
    bench.scheduler.landing_begin(grant.lease_id, grant.epoch, 0, 2, 0.0)
    bench.scheduler.landing_end(grant.lease_id, 0, 2, True, 0.0)
    bench.scheduler.attach(
        Attach(key("a"), grant.lease_id, grant.epoch, 5, 1, RULED), "owner", bench.now
    )
    bench.submit("b", [200])
    for _ in range(3):
        assert {w.key for w in bench.step()[0].works} == {key("b")}
    grammars.states[A] = READY
    assert key("a") in {w.key for w in bench.step()[0].works}
    grammars.states[A] = GrammarState(error=BadRequest("too slow"))
    bench.step()
    assert [event.key for _, event in failures(bench)] == [key("a")]


def test_a_started_prefill_goes_on_and_asks_on() -> None:
    grammars = Grammars()
    bench = Bench(config(chunk_tokens=2), grammars)
    grammars.states[A] = READY
    bench.submit("a", [100, 101, 102, 103], RULED)
    bench.step()
    grammars.asked.clear()
    grammars.states[A] = PENDING
    assert shape(bench.step()[0]) == [("a", 2, 2)]
    assert grammars.asked == [A]
    assert not bench.step()[0].works


def test_the_sampler_is_told_whose_output_it_is() -> None:
    grammars = Grammars()
    bench = bench_of(grammars)
    grammars.states[A] = READY
    job = Prefill(key("a", 2), (100, 101, 7, 8), replace(RULED, max_tokens=9), emitted=2)
    bench.scheduler.prefill(job, "owner", 0.0)
    (work,) = bench.step()[0].works
    assert work.sample is not None
    ask = work.sample
    assert (ask.key, ask.index, ask.tokens[ask.prompt :]) == (key("a", 2), 2, (7, 8))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=40))
def test_whenever_grammars_come_and_go_every_output_is_whole(
    turns: list[tuple[bool, bool]],
) -> None:
    """Grammars flicker on a pool too small for all."""
    grammars = Grammars()
    bench = Bench(config(total_blocks=10, max_model_len=28, max_running=3), grammars)
    asked = {"a": A, "b": B, "c": A, "d": None}
    for name, grammar in asked.items():
        sampling = Sampling(max_tokens=12, ignore_eos=True, grammar=grammar)
        bench.submit(name, [ord(name), 100], sampling)
    for a, b in turns:
        grammars.states = {A: READY if a else PENDING, B: READY if b else PENDING}
        bench.step()
    grammars.states = {A: READY, B: READY}
    bench.until_idle()
    for name in asked:
        expected = plain_loop([ord(name), 100], Sampling(max_tokens=12, ignore_eos=True))[0]
        assert bench.tokens[name] == expected
    assert bench.report().free_blocks == 10
