"""Random faults over a fake fleet: each request ends exactly once, with the right tokens.

A script says what happens to the n-th message of the whole run, when workers die, and when
clients go away.  Virtual time: a request that would hang for ever is a `Deadlock` or outlives
the bound.
"""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from core.messages import Cancel, Renew, WorkerReport
from tests.fakes import vtime
from tests.fakes.fleet import Fate
from tests.fakes.rig import Rig, expected, request, rig

LONGEST_S = 400.0
FLEETS = ["h", "p d", "p0 p1 d0 d1", "p d h", "d0 d1", "h0 h1"]
FATES = [Fate.DROP, Fate.DUPLICATE, Fate.LATE, Fate.KILL]

clients = st.lists(
    st.tuples(
        st.floats(0, 0.3),  # arrives
        st.integers(1, 12),  # prompt tokens
        st.integers(1, 14),  # max_tokens
        st.one_of(st.none(), st.floats(0, 0.5)),  # leaves after
    ),
    min_size=1,
    max_size=6,
)
faults = st.dictionaries(st.integers(0, 120), st.sampled_from(FATES), max_size=8)
upsets = st.lists(
    st.tuples(st.floats(0, 0.5), st.integers(0, 3), st.sampled_from(["kill", "hang", "drain"])),
    max_size=3,
)
capacities = st.tuples(st.integers(1, 8), st.integers(0, 3), st.integers(0, 2))


def scripted(script):
    numbers = iter(range(10**9))

    def tap(worker_id, message):
        if isinstance(message, WorkerReport):
            return Fate.PASS
        return script.get(next(numbers), Fate.PASS)

    return tap


def upset(r: Rig, index: int, how: str) -> None:
    workers = r.fleet.workers()
    if not workers:
        return
    worker = workers[index % len(workers)]
    if how == "kill":
        r.fleet.kill(worker.worker_id, restart_after_s=0.5)
    elif how == "hang":
        worker.hung = True
        loop = asyncio.get_running_loop()
        loop.call_later(30.0, r.fleet.kill, worker.worker_id, 0.5)
    else:
        worker.draining = True
        worker.report()


async def client(r: Rig, number: int, script) -> None:
    arrives, prompt, max_tokens, leaves = script
    await asyncio.sleep(arrives)
    ask = request(
        f"r{number}",
        prompt=tuple(range(number, number + prompt)),
        max_tokens=max_tokens,
        ignore_eos=bool(number % 2),
        logprobs=(None, 0, 2)[number % 3],
    )
    task = r.start(ask)
    if leaves is not None:
        asyncio.get_running_loop().call_later(leaves, task.cancel)
    async with asyncio.timeout(LONGEST_S):
        result = await task
    whole = expected(ask)
    ends = [result.error is not None, result.cancelled]
    if not any(ends):
        assert result.accounting.finish is not None
        assert result.tokens == whole
    else:
        assert ends.count(True) == 1
        assert result.tokens == whole[: len(result.tokens)]
        assert leaves is not None or not result.cancelled


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FLEETS), clients, faults, upsets, capacities)
def test_every_request_ends_once_and_right(fleet, people, script, troubles, capacity):
    slots, refusals, failed_transfers = capacity

    async def main():
        async with rig(fleet, scripted(script)) as r:
            for worker in r.fleet.workers():
                worker.slots = slots
                worker.refuse = refusals
                worker.transfer_fails = failed_transfers
            loop = asyncio.get_running_loop()
            for at, index, how in troubles:
                loop.call_later(at, upset, r, index, how)
            await asyncio.gather(*(client(r, i, each) for i, each in enumerate(people)))
            outcomes = r.dispatcher.counters.requests
            assert sum(outcomes.values()) == len(people)
            assert set(outcomes) <= {"finished", "cancelled", *TYPED}
            renewed = len(r.sent(Renew))
            await asyncio.sleep(60.0)
            assert len(r.sent(Renew)) == renewed

    vtime.run(main())


TYPED = {"overloaded", "unavailable", "worker_lost", "deadline_exceeded", "lease_gone"}
TYPED |= {"transfer_failed", "refused"}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["h", "p d", "p0 p1 d0 d1"]), clients)
def test_without_faults_nothing_is_retried(fleet, people):
    """Whatever clients do, a healthy fleet is never asked twice nor degraded."""

    async def main():
        async with rig(fleet) as r:
            await asyncio.gather(*(client(r, i, each) for i, each in enumerate(people)))
            counters = r.dispatcher.counters
            assert not counters.retries
            assert not counters.degraded
            assert counters.cancel_errors == counters.refusals == 0
            assert len(r.sent(Cancel)) == counters.cancels

    vtime.run(main())
