"""What every backend of the data plane must do, in one process."""

import random
import threading
import time

import pytest

from core.errors import TransferFailed
from core.ids import Epoch, LeaseId
from core.kvlayout import KVLayout
from core.ports import MoveState
from core.spec import TimeoutSpec
from tests.transport.data_rig import LARGE, MOVERS, SMALL, eventually, rig

pytestmark = pytest.mark.parametrize("mover", MOVERS)


def test_scattered_blocks_arrive_and_nothing_else_changes(mover: str) -> None:
    order = random.Random(4)
    with rig(mover) as made:
        link, placed = made.link(), {}
        free = list(range(64))
        order.shuffle(free)
        for count in (1, 2, 3, 5, 8, 13, 21):
            sources = tuple(order.sample(range(64), count))
            targets = tuple(free.pop() for _ in range(count))
            report = link.push(made.ticket(made.landing.reserve(targets), sources), 10)
            assert (report.state, report.bytes) == (MoveState.DONE, count * 1024)
            assert report.mover == mover
            placed |= dict(zip(targets, sources, strict=True))
            made.expect(placed)
        link.close()


@pytest.mark.parametrize("checksum", [True, False], ids=["sums", "no-sums"])
def test_a_push_larger_than_a_frame_lands_in_order(mover: str, checksum: bool) -> None:
    with rig(mover, blocks=2500, checksum=checksum) as made:
        targets = tuple(reversed(range(2500)))
        link = made.link()
        report = link.push(made.ticket(made.landing.reserve(targets), tuple(range(2500))), 10)
        assert (report.state, report.bytes) == (MoveState.DONE, 2500 * 1024)
        assert made.landing.begins == 3
        made.expect({t: s for s, t in enumerate(targets)})
        link.close()


def test_chunks_of_one_lease_land_at_their_places(mover: str) -> None:
    with rig(mover) as made:
        link, lease = made.link(), made.landing.reserve((9, 8, 7, 6))
        for first, ids in ((2, (20, 21)), (0, (30,)), (1, (40,))):
            assert link.push(made.ticket(lease, ids, first), 10).state is MoveState.DONE
        made.expect({9: 30, 8: 40, 7: 20, 6: 21})
        link.close()


def test_an_empty_ticket_is_done_at_once(mover: str) -> None:
    with rig(mover) as made:
        link = made.link()
        assert link.push(made.ticket(LeaseId("none"), ()), 10).state is MoveState.DONE
        assert made.landing.begins == 0
        link.close()


@pytest.mark.parametrize("wrong", ["lease", "epoch", "place"])
def test_a_lease_that_is_not_there_is_gone_and_the_link_goes_on(mover: str, wrong: str) -> None:
    with rig(mover) as made:
        link, lease = made.link(), made.landing.reserve((5, 6))
        bad = {
            "lease": made.ticket(LeaseId("unknown"), (1, 2)),
            "epoch": made.ticket(lease, (1, 2), epoch=Epoch(6)),
            "place": made.ticket(lease, (1, 2), first=1),
        }[wrong]
        report = link.push(bad, 10)
        assert (report.state, report.bytes) == (MoveState.GONE, 0)
        made.expect({})
        assert link.push(made.ticket(lease, (1, 2)), 10).state is MoveState.DONE
        made.expect({5: 1, 6: 2})
        link.close()


def test_pushing_landed_places_again_changes_nothing(mover: str) -> None:
    with rig(mover) as made:
        link, lease = made.link(), made.landing.reserve((5, 6))
        assert link.push(made.ticket(lease, (1, 2)), 10).state is MoveState.DONE
        assert link.push(made.ticket(lease, (3, 4)), 10).state is MoveState.GONE
        made.expect({5: 1, 6: 2})
        link.close()


def test_a_lease_revoked_after_some_frames_ends_the_push(mover: str) -> None:
    with rig(mover, blocks=2500) as made:
        link, lease = made.link(), made.landing.reserve(tuple(range(2500)))
        made.landing.on_begin = lambda: made.landing.revoke(lease)
        report = link.push(made.ticket(lease, tuple(range(2500))), 10)
        assert (report.state, report.bytes) == (MoveState.GONE, 1024 * 1024)
        made.landing.on_begin = lambda: None
        again = made.landing.reserve((0,))
        assert link.push(made.ticket(again, (0,)), 10).state is MoveState.DONE
        link.close()


def test_a_block_that_changed_hands_before_is_not_sent(mover: str) -> None:
    with rig(mover) as made:
        link, lease = made.link(), made.landing.reserve((5, 6))
        old = made.ticket(lease, (1, 2))
        made.source.generations[2] += 1
        report = link.push(old, 10)
        assert report.state is MoveState.FAILED
        assert "stale" in report.reason
        assert made.landing.begins == 0
        assert link.push(made.ticket(lease, (1, 2)), 10).state is MoveState.DONE
        link.close()


def test_a_block_that_changes_hands_during_the_move_fails_it(mover: str) -> None:
    with rig(mover) as made:
        link, lease = made.link(), made.landing.reserve((5, 6))

        def reuse() -> None:
            made.source.generations[2] += 1

        made.landing.on_begin = reuse
        report = link.push(made.ticket(lease, (1, 2)), 10)
        assert report.state is MoveState.FAILED
        assert "stale" in report.reason
        if mover == "shm":
            assert made.landing.ends == [False]
        made.landing.on_begin = lambda: None
        other = made.landing.reserve((7,))
        assert link.push(made.ticket(other, (2,)), 10).state is MoveState.DONE
        link.close()


@pytest.mark.parametrize("ids", [(64,), (1, 10_000), (-1,)], ids=["next", "far", "negative"])
def test_source_blocks_that_do_not_exist_are_not_sent(mover: str, ids: tuple[int, ...]) -> None:
    with rig(mover) as made:
        link, lease = made.link(), made.landing.reserve((5, 6))
        report = link.push(made.ticket(lease, ids), 10)
        assert report.state is MoveState.FAILED
        assert "out of range" in report.reason
        assert link.push(made.ticket(lease, (1, 2)), 10).state is MoveState.DONE
        link.close()


def test_a_ticket_that_does_not_add_up_is_not_sent(mover: str) -> None:
    with rig(mover) as made:
        link, lease = made.link(), made.landing.reserve((5, 6))
        for bad in (
            made.ticket(lease, (1, 2), generations=(0,)),
            made.ticket(LeaseId("x" * 65), (1,)),
        ):
            assert link.push(bad, 10).state is MoveState.FAILED
        assert made.landing.begins == 0
        assert link.push(made.ticket(lease, (1, 2)), 10).state is MoveState.DONE
        link.close()


@pytest.mark.parametrize(
    "layout",
    [
        KVLayout(layers=1, kv_heads=2, block_size=4, head_dim=16, dtype="float32"),
        KVLayout(layers=2, kv_heads=1, block_size=8, head_dim=16, dtype="bfloat16"),
    ],
    ids=["heads", "dtype"],
)
def test_another_layout_of_the_same_size_is_found_at_connect(mover: str, layout: KVLayout) -> None:
    assert layout.block_bytes == SMALL.block_bytes
    with rig(mover) as made, pytest.raises(TransferFailed, match="layout differs"):
        made.link(layout=layout)


def test_a_deadline_closes_the_link_and_fences_the_destination(mover: str) -> None:
    with rig(mover) as made:
        link, lease, go = made.link(), made.landing.reserve((5,)), threading.Event()
        made.landing.on_begin = lambda: go.wait(10) and None
        threading.Timer(0.6, go.set).start()
        report = link.push(made.ticket(lease, (1,)), 0.2)
        assert report.state is MoveState.FAILED
        assert "no answer within 0.2 s" in report.reason
        assert made.landing.settled(), "the report came before the destination was through"
        start = time.monotonic()
        assert link.push(made.ticket(lease, (1,)), 10).state is MoveState.FAILED
        assert time.monotonic() - start < 5
        link.close()


def test_a_destination_that_never_answers_delays_the_report_by_the_fence_only(mover: str) -> None:
    with rig(mover) as made:
        link, lease, go = made.link(), made.landing.reserve((5,)), threading.Event()
        made.landing.on_begin = lambda: go.wait(30) and None
        report = link.push(made.ticket(lease, (1,)), 0.1)
        assert report.state is MoveState.FAILED
        assert not go.is_set()
        go.set()
        assert eventually(made.landing.settled)


def test_a_slow_destination_holds_the_sender_back(mover: str) -> None:
    with rig(mover, LARGE, blocks=64) as made:
        link, go = made.link(), threading.Event()
        made.landing.on_begin = lambda: go.wait(10) and None
        lease = made.landing.reserve(tuple(range(64)))
        reports = []
        work = made.ticket(lease, tuple(range(64)))
        thread = threading.Thread(target=lambda: reports.append(link.push(work, 20)))
        thread.start()
        assert eventually(lambda: made.landing.begins == 1)
        assert not reports
        go.set()
        thread.join(20)
        assert reports[0].state is MoveState.DONE
        made.expect({i: i for i in range(64)})
        link.close()


def test_closing_wakes_a_push_and_returns_after_the_destination_is_through(mover: str) -> None:
    with rig(mover) as made:
        link, lease, go = made.link(), made.landing.reserve((5,)), threading.Event()
        made.landing.on_begin = lambda: go.wait(10) and None
        reports = []
        work = made.ticket(lease, (1,))
        thread = threading.Thread(target=lambda: reports.append(link.push(work, 60)))
        thread.start()
        assert eventually(lambda: made.landing.begins == 1)
        threading.Timer(0.3, go.set).start()
        link.close()
        assert made.landing.settled()
        thread.join(10)
        assert not thread.is_alive()
        assert link.push(work, 1).state is MoveState.FAILED


def test_two_pushes_at_once_take_turns(mover: str) -> None:
    with rig(mover) as made:
        link, reports = made.link(), []
        works = [made.ticket(made.landing.reserve((i,)), (i,)) for i in range(16)]
        threads = [
            threading.Thread(target=lambda w=w: reports.append(link.push(w, 20))) for w in works
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert [r.state for r in reports] == [MoveState.DONE] * 16
        made.expect({i: i for i in range(16)})
        link.close()


def test_links_of_several_threads_do_not_mix(mover: str) -> None:
    with rig(mover, blocks=64) as made:
        states = []

        def work(first: int) -> None:
            link = made.link()
            for i in range(first, first + 16):
                lease = made.landing.reserve((i,))
                states.append(link.push(made.ticket(lease, (63 - i,)), 20).state)
            link.close()

        threads = [threading.Thread(target=work, args=(i * 16,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert states == [MoveState.DONE] * 64
        made.expect({i: 63 - i for i in range(64)})
        assert made.counter("data_blocks_landed") == 64


def test_the_destination_decides_how_long_a_frame_may_take(mover: str) -> None:
    with rig(mover, timeouts=TimeoutSpec(transfer_s=0.2)) as made:
        link, lease = made.link(), made.landing.reserve((5,))
        made.landing.on_begin = lambda: time.sleep(0.4)
        report = link.push(made.ticket(lease, (1,)), 10)
        assert report.state is MoveState.FAILED
        assert made.landing.ends == [False]
        made.expect({})
