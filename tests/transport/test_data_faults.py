"""Injected faults: the data plane notices each, and what it does about it."""

import threading

import pytest

from core.ports import MoveState
from tests.transport.data_rig import MOVERS, eventually, rig
from transport.data_socket import DataSocket

everywhere = pytest.mark.parametrize("mover", MOVERS)


@everywhere
def test_a_dropped_frame_ends_at_the_deadline_and_a_new_link_goes_on(mover: str) -> None:
    with rig(mover) as made:
        link, lease = made.link(), made.landing.reserve((5,))
        made.inject(action="drop")
        report = link.push(made.ticket(lease, (1,)), 0.2)
        assert report.state is MoveState.FAILED
        assert "decode-0: link closed: no answer within 0.2 s" in report.reason
        assert made.landing.begins == 0
        again = made.link()
        assert again.push(made.ticket(lease, (1,)), 10).state is MoveState.DONE
        made.expect({5: 1})
        again.close()


@everywhere
@pytest.mark.parametrize("action", ["delay", "reorder"])
def test_a_late_frame_lands_all_the_same(mover: str, action: str) -> None:
    with rig(mover) as made:
        link, lease = made.link(), made.landing.reserve((5, 6))
        made.inject(action=action, delay_s=0.05)
        assert link.push(made.ticket(lease, (1,), 0), 10).state is MoveState.DONE
        assert link.push(made.ticket(lease, (2,), 1), 10).state is MoveState.DONE
        made.expect({5: 1, 6: 2})
        link.close()


@everywhere
def test_a_frame_delayed_past_the_deadline_lands_nowhere(mover: str) -> None:
    with rig(mover) as made:
        link, lease = made.link(), made.landing.reserve((5,))
        made.inject(action="delay", delay_s=0.3)
        assert link.push(made.ticket(lease, (1,)), 0.1).state is MoveState.FAILED
        assert made.landing.begins == 0
        made.expect({})


@everywhere
def test_a_frame_sent_twice_lands_once_and_later_answers_are_not_mixed_up(mover: str) -> None:
    with rig(mover) as made:
        link = made.link()
        made.inject(action="duplicate", count=0)
        for i in range(10):
            lease = made.landing.reserve((i,))
            assert link.push(made.ticket(lease, (20 + i,)), 10).state is MoveState.DONE
        made.expect({i: 20 + i for i in range(10)})
        assert eventually(lambda: made.counter("data_frames_gone") == 10)
        assert made.landing.begins == 10
        link.close()


@everywhere
def test_a_frame_cut_short_fails_and_ends_its_landing(mover: str) -> None:
    with rig(mover) as made:
        link, lease = made.link(), made.landing.reserve((5, 6))
        made.inject(action="truncate")
        report = link.push(made.ticket(lease, (1, 2)), 10)
        assert report.state is MoveState.FAILED
        assert eventually(made.landing.settled)
        assert made.landing.ends == ([False] if mover == "tcp" else [])
        again = made.link()
        assert again.push(made.ticket(lease, (1, 2)), 10).state is MoveState.DONE
        made.expect({5: 1, 6: 2})
        again.close()


@everywhere
def test_one_wrong_byte_is_noticed_and_the_link_goes_on(mover: str) -> None:
    with rig(mover) as made:
        link, lease = made.link(), made.landing.reserve((5, 6))
        made.inject(action="corrupt")
        report = link.push(made.ticket(lease, (1, 2)), 10)
        assert report.state is MoveState.FAILED
        assert "corrupt: checksum of place 0" in report.reason
        assert made.landing.ends == [False]
        assert made.counter("data_frames_failed") == 1
        assert link.push(made.ticket(lease, (1, 2)), 10).state is MoveState.DONE
        made.expect({5: 1, 6: 2})
        link.close()


def test_without_sums_shm_still_notices_a_wrong_generation() -> None:
    with rig("shm", checksum=False) as made:
        link, lease = made.link(), made.landing.reserve((5, 6))
        made.inject(action="corrupt")
        report = link.push(made.ticket(lease, (1, 2)), 10)
        assert report.state is MoveState.FAILED
        assert "stale" in report.reason
        made.expect({})
        link.close()


@everywhere
def test_the_probe_at_connect_is_not_counted_as_data(mover: str) -> None:
    with rig(mover) as made:
        made.inject(action="drop")
        link = made.link()
        assert made.faults.hits == (0,)
        link.close()


def test_shm_notices_a_block_that_changes_hands_while_it_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rig("shm", checksum=False) as made:
        link, lease, steps = made.link(), made.landing.reserve((5, 6, 7)), []
        check = DataSocket.check

        def reuse_at_second_block(wire: DataSocket, deadline: float) -> None:
            check(wire, deadline)
            if threading.current_thread().name == "data-receive-shm" and made.landing.active:
                steps.append(wire)
                if len(steps) == 2:
                    made.source.generations[1] += 1

        monkeypatch.setattr(DataSocket, "check", reuse_at_second_block)
        report = link.push(made.ticket(lease, (1, 2, 3)), 10)
        assert report.state is MoveState.FAILED
        assert made.landing.ends == [False]
        assert len(steps) == 3
        link.close()
