"""The supervisor's wake-up signal: nobody misses a change, nobody waits past the deadline."""

import asyncio

from cluster.news import News


def test_a_change_wakes_every_waiter_whose_condition_holds():
    async def scenario():
        news, state = News(), []
        waiters = [
            asyncio.create_task(news.until(lambda n=n: len(state) >= n, 30)) for n in (1, 1, 2)
        ]
        await asyncio.sleep(0)
        state.append("x")
        news.tell()
        assert await asyncio.wait_for(asyncio.gather(*waiters[:2]), 5) == [True, True]
        assert not waiters[2].done()
        state.append("y")
        news.tell()
        assert await asyncio.gather(*waiters) == [True, True, True]

    asyncio.run(scenario())


def test_what_holds_already_is_not_waited_for():
    assert asyncio.run(News().until(lambda: True, timeout_s=0)) is True


def test_the_deadline_ends_the_wait_although_others_make_noise():
    async def scenario():
        news = News()
        waiter = asyncio.create_task(news.until(lambda: False, 0.05))
        for _ in range(100):
            news.tell()
            await asyncio.sleep(0.005)
            if waiter.done():
                break
        assert waiter.done()
        assert await waiter is False

    asyncio.run(scenario())


def test_count_tells_whether_anything_happened_in_between():
    async def scenario():
        news = News()
        before = news.count
        news.tell()
        assert news.count != before
        assert await news.until(lambda: news.count != before, 0)

    asyncio.run(scenario())
