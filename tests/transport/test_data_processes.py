"""Source and destination in processes of their own, killed at the worst moments."""

import contextlib
import gc
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.messages import DataEndpoint
from core.ports import MoveState
from core.spec import TimeoutSpec, TransportSpec
from tests.transport.data_peer import BLOCKS
from tests.transport.data_rig import LARGE, MOVERS, eventually, filled, rig, ticket
from transport.arena import MemfdArena
from transport.link import Source, open_link

pytestmark = pytest.mark.parametrize("mover", MOVERS)
ROOT = Path(__file__).parents[2]
ALL = tuple(range(BLOCKS))


@contextlib.contextmanager
def child(role: str, **job: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.transport.data_peer", role, json.dumps(job)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def heard(process: subprocess.Popen[str]) -> dict[str, object]:
    return json.loads(process.stdout.readline())


@contextlib.contextmanager
def remote(
    mover: str, die_at: int = 0
) -> Iterator[tuple[subprocess.Popen[str], DataEndpoint, Source, bytes]]:
    """A destination process; leases "0" … "7" hold places 0 … 63.  And a source to it, here."""
    arena = filled(MemfdArena.create(BLOCKS, LARGE.block_bytes), seed=2)
    key = secrets.token_bytes(32)
    with child("destination", key=key.hex(), die_at=die_at) as process:
        endpoint = DataEndpoint(mover, heard(process)["endpoints"][mover])
        yield process, endpoint, Source(arena, LARGE, TransportSpec(), TimeoutSpec()), key
    arena.close()


def test_blocks_of_another_process_arrive(mover: str) -> None:
    with rig(mover, LARGE, BLOCKS) as made:
        leases = [made.landing.reserve(ALL), made.landing.reserve(tuple(reversed(ALL)))]
        job = {"mover": mover, "address": made.endpoint.address, "key": made.key.hex()}
        with child("source", **job, leases=leases, action="", skip=0) as process:
            for _ in leases:
                assert heard(process) == {
                    "state": "done",
                    "bytes": BLOCKS * LARGE.block_bytes,
                    "reason": "",
                }
        made.expect({63 - i: i for i in ALL})  # the peer's arena has the same content, by seed


def test_a_source_killed_in_the_middle_of_a_frame_ends_its_landing(mover: str) -> None:
    with rig(mover, LARGE, BLOCKS) as made:
        leases = [made.landing.reserve(ALL), made.landing.reserve(ALL)]
        job = {"mover": mover, "address": made.endpoint.address, "key": made.key.hex()}
        with child("source", **job, leases=leases, action="kill", skip=1) as process:
            assert heard(process)["state"] == "done"
            assert process.wait(20) == -signal.SIGKILL
        assert eventually(made.landing.settled)
        assert eventually(
            lambda: not any(t.name.startswith("data-receive") for t in threading.enumerate())
        )
        assert made.landing.ends == ([True, False] if mover == "tcp" else [True])
        link, fresh = made.link(), made.landing.reserve((1,))
        assert link.push(made.ticket(fresh, (2,)), 10).state is MoveState.DONE
        link.close()


def test_a_source_killed_at_any_moment_leaves_no_landing_open(mover: str) -> None:
    with rig(mover, LARGE, BLOCKS) as made:
        for wait_s in (0.0, 0.002, 0.005, 0.011):
            leases = [made.landing.reserve(ALL) for _ in range(200)]
            job = {"mover": mover, "address": made.endpoint.address, "key": made.key.hex()}
            with child("source", **job, leases=leases, action="", skip=0) as process:
                assert heard(process)["state"] == "done"
                time.sleep(wait_s)
                process.send_signal(signal.SIGKILL)
                process.wait(20)
            assert eventually(made.landing.settled)


def test_a_destination_killed_in_the_middle_of_a_frame_fails_the_push(mover: str) -> None:
    with remote(mover, die_at=2) as (process, endpoint, source, key):
        link = open_link(endpoint, key, source, "decode-0")
        assert link.push(ticket(source.arena, "0", ALL), 20).state is MoveState.DONE
        report = link.push(ticket(source.arena, "1", ALL), 20)
        assert report.state is MoveState.FAILED
        assert report.reason.startswith("decode-0: link closed")
        assert link.push(ticket(source.arena, "2", ALL), 20).state is MoveState.FAILED
        assert process.wait(20) == -signal.SIGKILL
        link.close()


def test_a_stopped_destination_costs_the_deadline_and_the_fence(mover: str) -> None:
    with remote(mover) as (process, endpoint, source, key):
        link = open_link(endpoint, key, source, "decode-0")
        process.send_signal(signal.SIGSTOP)
        report = link.push(ticket(source.arena, "0", ALL), 0.2)
        assert report.state is MoveState.FAILED
        assert "no answer within 0.2 s" in report.reason
        process.send_signal(signal.SIGCONT)
        again = open_link(endpoint, key, source, "decode-0")
        assert again.push(ticket(source.arena, "1", ALL), 20).state is MoveState.DONE
        again.close()
        process.stdin.close()
        end = heard(process)
        assert (end["fenced"], end["settled"]) == (True, True)
        assert end["content"] == bytes(source.arena.blocks[:64]).hex()


def test_a_restarted_destination_needs_a_new_link(mover: str) -> None:
    with remote(mover) as (process, endpoint, source, key):
        link = open_link(endpoint, key, source, "decode-0")
        process.kill()
        process.wait(20)
        assert link.push(ticket(source.arena, "0", ALL), 20).state is MoveState.FAILED
        with remote(mover) as (_, other, _, new_key):
            again = open_link(other, new_key, source, "decode-0")
            assert again.push(ticket(source.arena, "0", ALL), 20).state is MoveState.DONE
            again.close()


def resources() -> tuple[int, int, int]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), threading.active_count(), pages * 4096


def test_ten_thousand_transfers_leave_nothing_behind(mover: str) -> None:
    with rig(mover) as made:
        link = made.link()

        def transfer(times: int) -> None:
            for i in range(times):
                lease = made.landing.reserve((i % 64,))
                assert link.push(made.ticket(lease, ((i * 7) % 64,)), 20).state is MoveState.DONE
                made.landing.revoke(lease)
            made.landing.ends.clear()
            made.landing.begins = 0

        transfer(1000)
        before = resources()
        transfer(10_000)
        after = resources()
        assert after[:2] == before[:2]
        assert after[2] - before[2] < 4 << 20
        made.expect({i % 64: (i * 7) % 64 for i in range(9936, 10_000)})
        link.close()


def test_two_hundred_links_leave_nothing_behind(mover: str) -> None:
    with rig(mover) as made:
        made.link().close()
        assert eventually(lambda: made.server.expel("nobody"))
        before = resources()
        for _ in range(200):
            made.link().close()
        assert eventually(lambda: resources()[:2] == before[:2])
