"""The small parts of the dispatcher: ledger, output, admission, retry, line."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import (
    BY_CODE,
    BadRequest,
    DeadlineExceeded,
    Incompatible,
    InternalError,
    LeaseGone,
    Overloaded,
    Refused,
    Stage,
    TransferFailed,
    Unavailable,
    WorkerLost,
)
from core.ids import AttemptKey, Epoch, RequestId, WorkerId
from core.messages import FinishReason, TokenEvent
from core.sampling import Sampling, TokenLogprobs
from router import admission, retry
from router.generation import Channel
from router.ledger import Ledger
from router.line import Line
from router.output import Output
from router.plan import Placement
from router.request import Token
from tests.fakes import vtime

KEY = AttemptKey(RequestId("r"), 1)
W, V = WorkerId("w"), WorkerId("v")

# ------------------------------------------------------------------------------ ledger


def test_a_hold_counts_until_released_and_releases_once():
    ledger = Ledger()
    first, second = ledger.hold(W, Epoch(1), 10), ledger.hold(W, Epoch(1), 5)
    assert ledger.load(W, Epoch(1)) == 15
    first.release()
    first.release()
    assert ledger.load(W, Epoch(1)) == 5
    second.release()
    assert ledger.snapshot() == {}


def test_a_late_release_of_a_dead_incarnation_leaves_its_successor_alone():
    ledger = Ledger()
    old = ledger.hold(W, Epoch(1), 10)
    new = ledger.hold(W, Epoch(2), 3)
    assert ledger.snapshot() == {W: 13}
    old.release()
    assert (ledger.load(W, Epoch(1)), ledger.load(W, Epoch(2))) == (0, 3)
    new.release()
    assert ledger.snapshot() == {}


# ------------------------------------------------------------------------------ output


def event(index, *tokens, finish=None):
    return TokenEvent(KEY, index, tokens, finish)


def output_of(max_tokens):
    return Output(Sampling(max_tokens=max_tokens))


def accept(output, event):
    return tuple(token.id for token in output.accept(event))


def test_partly_repeated_events_add_only_what_is_new():
    output = output_of(9)
    assert accept(output, event(0, 7, 8)) == (7, 8)
    assert accept(output, event(1, 8, 9, 10)) == (9, 10)
    assert accept(output, event(0, 7)) == ()
    assert output.tokens == [7, 8, 9, 10]


def test_a_gap_is_an_error_and_changes_nothing():
    output = output_of(9)
    output.accept(event(0, 7))
    with pytest.raises(TransferFailed, match="1 to 2"):
        output.accept(event(3, 9))
    assert output.tokens == [7]


def test_a_repeated_last_token_still_finishes():
    output = output_of(9)
    output.accept(event(0, 7))
    assert accept(output, event(0, 7, finish=FinishReason.STOP)) == ()
    assert output.finish is FinishReason.STOP


def test_max_tokens_end_it_even_without_a_finish():
    output = output_of(2)
    output.accept(event(0, 7, 8))
    assert output.finish is FinishReason.LENGTH
    assert accept(output, event(2, 9)) == ()


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=40),
)
def test_any_pieces_in_any_order_give_a_prefix(whole, pieces):
    """Slices of the true output, repeated and shuffled: what is accepted is its beginning."""
    output = output_of(len(whole))
    taken = []
    for start, end in pieces:
        if not start < end <= len(whole):
            continue
        finish = FinishReason.STOP if end == len(whole) else None
        try:
            taken += accept(output, event(start, *whole[start:end], finish=finish))
        except TransferFailed:
            assert start > len(output.tokens)
        assert taken == output.tokens == whole[: len(taken)]
        assert (output.finish is not None) == (len(taken) == len(whole))


def told(index, *tokens):
    """An event whose log probabilities say which attempt they are of."""
    return TokenEvent(KEY, index, tokens, logprobs=tuple(TokenLogprobs(-t / 10) for t in tokens))


def test_log_probabilities_stay_with_their_token_and_the_first_of_a_position_counts():
    output = Output(Sampling(max_tokens=9, logprobs=0))
    first = output.accept(told(0, 7, 8))
    again = output.accept(told(1, 5, 6))
    assert [(t.id, t.logprobs.logprob) for t in (*first, *again)] == [
        (7, -0.7),
        (8, -0.8),
        (6, -0.6),
    ]


def test_a_token_without_the_log_probabilities_asked_for_is_computed_again():
    output = Output(Sampling(max_tokens=9, logprobs=0))
    with pytest.raises(TransferFailed, match="log probabilities"):
        output.accept(event(0, 7))
    assert output.tokens == []
    assert output.finish is None


# ------------------------------------------------------------------------------ admission


@pytest.mark.parametrize(
    ("workers", "waiting", "limit", "kind"),
    [
        (0, 0, 9, Unavailable),
        (1, 0, 0, type(None)),
        (1, 8, 9, type(None)),
        (1, 9, 9, Overloaded),
    ],
)
def test_who_is_admitted(workers, waiting, limit, kind):
    assert type(admission.admit(workers, waiting, limit)) is kind


def test_who_may_park():
    assert admission.park(8, 9) is None
    refusal = admission.park(9, 9)
    assert refusal.stage is Stage.QUEUE
    assert refusal.retry_after_s > 0


def test_what_a_waiting_request_ends_with():
    busy = admission.expired(2, 5.0, "no blocks")
    assert isinstance(busy, Overloaded)
    assert "no blocks" in busy.message
    assert isinstance(admission.expired(0, 5.0, ""), Unavailable)


# ------------------------------------------------------------------------------ retry


PAIR = Placement(W, V)


def decided(error, accepted=True, attempts=1, placement=PAIR):
    return retry.decide(retry.Ended(error, placement, accepted, attempts), max_attempts=3)


def test_a_refusal_before_acceptance_tries_the_next_whatever_the_count():
    error = Refused("full", worker="w")
    assert decided(error, accepted=False, attempts=3) == retry.Next(W)
    assert decided(error, accepted=True) == retry.Again(W)


def test_a_lost_or_slow_worker_is_avoided():
    assert decided(WorkerLost("x", worker="w")) == retry.Again(W)
    assert decided(DeadlineExceeded("x", worker="v", stage=Stage.DECODE)) == retry.Again(V)


def test_a_lease_that_is_gone_is_reserved_again():
    assert decided(LeaseGone("x", worker="v")) == retry.Again()


@pytest.mark.parametrize(
    "error",
    [TransferFailed("x"), Incompatible("x"), DeadlineExceeded("x", stage=Stage.TRANSFER)],
    ids=lambda e: e.code,
)
def test_what_cannot_be_moved_is_recomputed_where_it_was_to_go(error):
    assert decided(error) == retry.Recompute(V)


def test_the_clients_fault_and_broken_invariants_are_final():
    for error in (BadRequest("x"), InternalError("x")):
        assert decided(error) == retry.Fail(error)


@given(
    st.sampled_from(sorted(BY_CODE)),
    st.sampled_from(Stage),
    st.booleans(),
    st.integers(1, 5),
)
def test_every_error_has_a_verdict_and_attempts_are_bounded(code, stage, accepted, attempts):
    error = BY_CODE[code]("x", stage=stage, worker="w")
    verdict = decided(error, accepted, attempts)
    refused = isinstance(error, Refused) and not accepted
    if attempts >= 3 and not refused:
        assert verdict == retry.Fail(error)
    if isinstance(verdict, retry.Fail):
        assert verdict.error is error
        assert attempts >= 3 or not error.retryable


# ------------------------------------------------------------------------------ line


def test_only_the_first_may_try_and_the_older_goes_first():
    line = Line()
    assert line.may_try(5)
    line.join(5, set())
    line.join(3, set())
    assert [line.may_try(t) for t in (2, 3, 4, 5, 6)] == [True, True, False, False, False]
    line.leave(3)
    line.leave(3)
    assert line.may_try(5)
    assert len(line) == 1


@pytest.mark.parametrize(
    ("news", "woken"), [(W, True), (V, False), (None, True)], ids=["refuser", "other", "anybody"]
)
def test_news_of_a_refuser_wakes_the_first(news, woken):
    async def main():
        line = Line()
        line.join(1, {W})
        asyncio.get_running_loop().call_later(1.0, line.changed, news)
        await line.wait(1, 5.0)
        return vtime.now()

    assert vtime.run(main()) == (1.0 if woken else 5.0)


def test_news_while_nobody_waits_is_not_lost():
    async def main():
        line = Line()
        line.join(1, {W})
        line.changed(W)
        await line.wait(1, 5.0)
        assert vtime.now() == 0.0
        await line.wait(1, 5.0)
        assert vtime.now() == 5.0

    vtime.run(main())


def test_the_next_moves_up_when_the_first_leaves():
    async def main():
        line = Line()
        line.join(1, set())
        line.join(2, set())
        asyncio.get_running_loop().call_later(1.0, line.leave, 1)
        await line.wait(2, 5.0)
        return vtime.now()

    assert vtime.run(main()) == 1.0


# ------------------------------------------------------------------------------ channel


def test_tokens_before_an_error_are_delivered_and_the_error_once():
    async def main():
        channel = Channel()
        channel.put((Token(1), Token(2)))
        channel.put((Token(3),))
        channel.close(WorkerLost("x"))
        assert await channel.get() == (Token(1), Token(2), Token(3))
        with pytest.raises(WorkerLost):
            await channel.get()
        assert await channel.get() == ()

    vtime.run(main())
