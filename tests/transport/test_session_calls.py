"""Calls, their answers and their errors, over real sockets."""

import asyncio

import pytest

from core.errors import BY_CODE, BodyTooLarge, DeadlineExceeded, InternalError, Refused, Stage
from core.ids import AttemptKey
from core.messages import Abort, Accepted, Grant, Renew, Reserve
from tests.transport.session_peer import (
    CALL_S,
    CALLS,
    GRANT,
    KEY,
    WELCOME,
    Worker,
    ask,
    run,
    served,
)
from transport.wire import SessionLimits


def test_every_call_reaches_the_handler_whole_and_is_answered():
    async def scenario():
        async with served() as pair:
            session = (await pair.client()).session
            replies = [await session.call(call, CALL_S) for call in CALLS]
            assert replies == [GRANT, Accepted(KEY), Accepted(KEY), Accepted(KEY)]
            assert pair.worker.calls == list(CALLS)
            assert session.welcome == WELCOME
            assert session.info == WELCOME.info

    run(scenario())


def test_a_plain_function_can_answer_calls():
    class Plain(Worker):
        def on_call(self, session, call):
            if isinstance(call, Reserve):
                raise Refused("full", stage=Stage.RESERVE)
            return Accepted(call.key)

    async def scenario():
        async with served(Plain()) as pair:
            session = (await pair.client()).session
            assert await session.call(CALLS[3], CALL_S) == Accepted(KEY)
            with pytest.raises(Refused, match="full"):
                await session.call(ask(), CALL_S)

    run(scenario())


def test_notices_arrive_in_order_and_need_no_answer():
    notices = [Renew((KEY, AttemptKey("other", 2))), Abort(KEY, "lease", "gave up"), Renew(())]

    async def scenario():
        async with served() as pair:
            session = (await pair.client()).session
            for notice in notices:
                await session.notify(notice)
            await session.call(ask(), CALL_S)
            assert pair.worker.notices == notices

    run(scenario())


def test_a_notice_that_crashes_the_handler_costs_nothing_else():
    class Crashing(Worker):
        def on_notice(self, session, notice):
            raise ZeroDivisionError

    async def scenario():
        async with served(Crashing()) as pair:
            session = (await pair.client()).session
            await session.notify(Renew(()))
            assert await session.call(ask(), CALL_S) == GRANT

    run(scenario())


def test_answers_overtake_each_other_and_find_their_callers():
    async def scenario():
        async with served() as pair:
            session = (await pair.client()).session
            finished = []

            async def one(i):
                reply = await session.call(ask(f"wait {0.2 - i * 0.02}", f"r{i}"), CALL_S)
                finished.append(i)
                assert isinstance(reply, Grant)
                assert reply.key == AttemptKey(f"r{i}", 1)

            await asyncio.gather(*(one(i) for i in range(10)))
            assert finished != sorted(finished)
            assert finished[-1] == 0

    run(scenario())


def test_a_call_ends_at_its_deadline_and_its_late_answer_is_ignored():
    async def scenario():
        async with served() as pair:
            client = await pair.client()
            with pytest.raises(DeadlineExceeded) as caught:
                await client.session.call(ask("wait 0.2"), 0.05)
            assert (caught.value.stage, caught.value.worker) == (Stage.RESERVE, "worker-0")
            assert await client.session.call(ask("wait 0.3"), CALL_S) == GRANT
            assert client.session.counts.unknown_replies == 1
            assert client.losses == []

    run(scenario())


def test_a_cancelled_call_leaves_the_session_in_order():
    async def scenario():
        async with served() as pair:
            session = (await pair.client()).session
            task = asyncio.create_task(session.call(ask("wait 0.1"), CALL_S))
            await asyncio.sleep(0.02)
            task.cancel()
            assert await session.call(ask("wait 0.2"), CALL_S) == GRANT
            assert task.cancelled()

    run(scenario())


def test_every_error_of_the_tree_keeps_its_type_and_fields():
    async def scenario():
        async with served() as pair:
            session = (await pair.client()).session
            for code, kind in BY_CODE.items():
                with pytest.raises(kind) as caught:
                    await session.call(ask(f"raise {code}"), CALL_S)
                error = caught.value
                assert type(error) is kind
                assert (error.message, error.stage, error.worker) == ("no", Stage.RESERVE, "w")
                assert (error.retry_after_s, error.field) == (1.5, "f")

    run(scenario())


@pytest.mark.parametrize("order", ["crash", "unsendable"])
def test_a_bug_in_the_worker_is_an_internal_error_of_that_call_only(order, caplog):
    async def scenario():
        async with served() as pair:
            session = (await pair.client()).session
            with pytest.raises(InternalError) as caught:
                await session.call(ask(order), CALL_S)
            assert caught.value.worker == "worker-0"
            assert await session.call(ask(), CALL_S) == GRANT

    run(scenario())
    assert "Traceback" in caplog.text


def test_a_message_that_cannot_be_sent_fails_its_caller_only():
    async def scenario():
        async with served() as pair:
            session = (await pair.client()).session
            with pytest.raises(InternalError, match="Reserve cannot be sent"):
                await session.call(Reserve(KEY, (-1,)), CALL_S)
            with pytest.raises(BodyTooLarge):
                await session.call(Reserve(KEY, (1 << 31,) * (4 << 20)), CALL_S)
            assert await session.call(ask(), CALL_S) == GRANT

    run(scenario())


def test_a_prompt_of_a_million_tokens_travels():
    tokens = tuple(range(1_000_000))

    async def scenario():
        async with served() as pair:
            session = (await pair.client()).session
            await session.call(Reserve(KEY, tokens), 30.0)
            assert pair.worker.calls[0].tokens == tokens

    run(scenario())


def test_more_calls_than_allowed_at_once_are_refused():
    async def scenario():
        async with served(limits=SessionLimits(running=2)) as pair:
            session = (await pair.client()).session
            calls = (session.call(ask("wait 0.2"), CALL_S) for _ in range(4))
            replies = await asyncio.gather(*calls, return_exceptions=True)
            assert replies[:2] == [GRANT, GRANT]
            assert [type(r) for r in replies[2:]] == [Refused, Refused]
            assert len(pair.worker.calls) == 2

    run(scenario())
