"""Who may connect, what a hostile or broken sender can do, and what expelling guarantees."""

import os
import secrets
import socket
import threading
from dataclasses import replace

import pytest

from core.errors import TransferFailed
from core.ids import LeaseId
from core.messages import DataEndpoint
from core.ports import MoveState
from core.spec import TimeoutSpec, TransportSpec
from tests.transport.data_rig import LARGE, MOVERS, RawPeer, Rig, StrictLanding, eventually, rig
from transport import data_hello
from transport.arena import MemfdArena
from transport.data_server import DataServer
from transport.frame import Kind, checksum
from transport.link import Source, open_link

everywhere = pytest.mark.parametrize("mover", MOVERS)


def dial(made: Rig) -> socket.socket:
    if made.mover == "shm":
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(10)
        sock.connect(made.endpoint.address.replace("@", "\0"))
        return sock
    host, port = made.endpoint.address.split(":")
    return socket.create_connection((host, int(port)), 10)


def closed(sock: socket.socket) -> bool:
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


@everywhere
def test_an_unknown_key_is_refused_and_counted(mover: str) -> None:
    with rig(mover) as made:
        with pytest.raises(TransferFailed, match="try another mover") as caught:
            made.link(key=secrets.token_bytes(32))
        assert caught.value.worker == "decode-0"
        assert made.counter("data_refused") == 1
        made.link().close()


@everywhere
def test_a_key_ends_with_its_peer_and_a_new_one_opens_again(mover: str) -> None:
    with rig(mover) as made:
        link, lease = made.link(), made.landing.reserve((5,))
        assert made.server.expel("prefill-0")
        assert link.push(made.ticket(lease, (1,)), 10).state is MoveState.FAILED
        with pytest.raises(TransferFailed):
            made.link()
        key = secrets.token_bytes(16)
        made.server.admit("prefill-0", key)
        again = made.link(key=key)
        assert again.push(made.ticket(lease, (1,)), 10).state is MoveState.DONE
        again.close()


@everywhere
def test_expelling_one_peer_leaves_the_others(mover: str) -> None:
    with rig(mover) as made:
        other = secrets.token_bytes(16)
        made.server.admit("prefill-1", other)
        link = made.link(key=other)
        assert made.server.expel("prefill-0")
        lease = made.landing.reserve((5,))
        assert link.push(made.ticket(lease, (1,)), 10).state is MoveState.DONE
        link.close()


@everywhere
def test_no_byte_lands_after_expel_returned(mover: str) -> None:
    with rig(mover, LARGE, blocks=8) as made:
        link, lease, go = made.link(), made.landing.reserve(tuple(range(8))), threading.Event()
        made.landing.on_begin = lambda: go.wait(10) and None
        work, reports = made.ticket(lease, tuple(range(8))), []
        push = threading.Thread(target=lambda: reports.append(link.push(work, 20)))
        push.start()
        assert eventually(lambda: made.landing.begins == 1)
        threading.Timer(0.2, go.set).start()
        assert made.server.expel("prefill-0")
        assert made.landing.ends == [False]
        made.expect({})
        push.join(20)
        assert reports[0].state is MoveState.FAILED


def test_expel_ends_a_sender_that_stopped_in_the_middle_of_its_payload() -> None:
    with rig("tcp") as made:
        peer, lease = RawPeer(made), made.landing.reserve((5, 6))
        peer.send(peer.frame(lease, (1, 2)), bytes(1500))
        assert eventually(lambda: made.landing.begins == 1)
        assert made.landing.active
        assert made.server.expel("prefill-0")
        assert made.landing.ends == [False]
        peer.close()


def test_a_sender_that_stops_in_the_middle_of_its_payload_is_dropped_after_a_while() -> None:
    with rig("tcp", timeouts=TimeoutSpec(transfer_s=0.2)) as made:
        peer, lease = RawPeer(made), made.landing.reserve((5, 6))
        peer.send(peer.frame(lease, (1, 2)), bytes(1500))
        assert closed(peer.socket.sock)
        assert made.landing.ends == [False]
        peer.close()


@everywhere
@pytest.mark.parametrize("size", [0, 1, 24, 55, 56, 300], ids=str)
def test_a_stranger_that_speaks_garbage_is_closed(mover: str, size: int) -> None:
    with rig(mover, timeouts=TimeoutSpec(connect_s=0.3)) as made, dial(made) as sock:
        sock.sendall(secrets.token_bytes(size))
        assert closed(sock)
        assert made.landing.begins == 0
        made.link().close()


@everywhere
def test_a_proof_cannot_be_replayed(mover: str) -> None:
    with rig(mover) as made, dial(made) as sock:
        challenge = sock.recv(16)
        assert challenge != bytes(16)
        geometry = made.source.geometry
        proof = data_hello.encode_hello(geometry, made.key, secrets.token_bytes(16), mover)
        sock.sendall(proof)
        assert closed(sock)
        assert made.counter("data_refused") == 1
        RawPeer(made).close()


@everywhere
def test_a_proof_for_one_backend_does_not_open_another(mover: str) -> None:
    with rig(mover) as made, dial(made) as sock:
        other = "tcp" if mover == "shm" else "shm"
        proof = data_hello.encode_hello(made.source.geometry, made.key, sock.recv(16), other)
        sock.sendall(proof)
        assert closed(sock)
        assert made.counter("data_refused") == 1


@everywhere
def test_a_damaged_header_closes_the_connection_and_lands_nothing(mover: str) -> None:
    with rig(mover) as made:
        peer = RawPeer(made)
        peer.socket.send([secrets.token_bytes(200)], peer.deadline)
        answer = peer.answer()
        assert (answer.sequence, answer.state) == (0, MoveState.FAILED)
        assert "bad frame" in answer.reason
        assert closed(peer.socket.sock)
        assert made.landing.begins == 0
        peer.close()


@everywhere
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"layout": 1}, "layout differs"),
        ({"inline_bytes": 7}, "bytes of payload"),
    ],
    ids=["layout", "payload"],
)
def test_a_frame_that_does_not_fit_is_refused_and_the_next_is_read(
    mover: str, wrong: dict[str, int], reason: str
) -> None:
    with rig(mover) as made:
        peer, lease = RawPeer(made), made.landing.reserve((5, 6))
        peer.send(peer.frame(lease, (1, 2), **wrong))
        answer = peer.answer()
        assert (answer.sequence, answer.state) == (1, MoveState.FAILED)
        assert reason in answer.reason
        assert made.landing.begins == 0
        peer.send(peer.frame(lease, (1, 2), sequence=2))
        assert peer.answer().state is MoveState.DONE
        peer.close()


@everywhere
def test_a_probe_lands_nowhere_and_finds_bytes_that_are_not_the_senders(mover: str) -> None:
    with rig(mover) as made:
        peer, beacon = RawPeer(made), made.source.beacon
        block = bytes(made.source.block(0))
        good = peer.frame(
            LeaseId(""),
            (0,),
            kind=Kind.PROBE,
            generations=(beacon,),
            sums=(checksum(memoryview(block)),) if mover == "tcp" else (),
        )
        payload = block if mover == "tcp" else b""
        peer.send(good, payload)
        assert peer.answer().state is MoveState.DONE
        if mover == "tcp":
            peer.send(replace(good, sequence=2), bytes(len(block)))
        else:
            peer.send(replace(good, sequence=2, generations=(beacon ^ 1,)), b"")
        assert peer.answer().state is MoveState.FAILED
        peer.send(replace(peer.frame(LeaseId(""), (0, 1), kind=Kind.PROBE), sequence=3))
        assert peer.answer().state is MoveState.FAILED
        assert made.landing.begins == 0
        made.expect({})
        peer.close()


def test_shm_refuses_source_blocks_that_do_not_exist() -> None:
    with rig("shm") as made:
        peer, lease = RawPeer(made), made.landing.reserve((5, 6))
        peer.send(peer.frame(lease, (1, 64)))
        answer = peer.answer()
        assert answer.state is MoveState.FAILED
        assert "out of range" in answer.reason
        assert made.landing.begins == 0
        peer.close()


def test_shm_refuses_an_arena_that_could_shrink_under_it() -> None:
    with rig("shm") as made:
        fd = os.memfd_create("loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, made.source.geometry.total_bytes)
        peer = RawPeer(made, fd)
        os.close(fd)
        assert peer.greeting.state is MoveState.FAILED
        assert "not a sealed arena" in peer.greeting.reason
        peer.close()


@everywhere
def test_blocks_of_another_size_are_refused_with_both_sizes(mover: str) -> None:
    with rig(mover) as made:
        other = MemfdArena.create(4, LARGE.block_bytes)
        source = Source(other, LARGE, made.transport, made.timeouts)
        with pytest.raises(TransferFailed, match="262144 bytes there, 1024 here"):
            open_link(made.endpoint, made.key, source, "decode-0")
        other.close()


@everywhere
def test_a_landing_that_names_foreign_blocks_writes_nothing(mover: str) -> None:
    with rig(mover) as made:
        link, lease = made.link(), made.landing.reserve((5, 64))
        assert link.push(made.ticket(lease, (1, 2)), 10).state is MoveState.FAILED
        assert made.landing.ends == [False]
        made.expect({})


@everywhere
def test_nobody_listens_after_close(mover: str) -> None:
    with rig(mover) as made:
        endpoint = made.endpoint
        source = Source(made.source, made.layout, made.transport, made.timeouts)
    with pytest.raises(TransferFailed, match="link to"):
        open_link(endpoint, made.key, source, "decode-0")


@pytest.mark.parametrize(
    ("preference", "movers"),
    [("auto", ["shm", "tcp"]), ("shm", ["shm"]), ("tcp", ["tcp"])],
    ids=["auto", "shm", "tcp"],
)
def test_only_the_configured_backends_listen(preference: str, movers: list[str]) -> None:
    arena = MemfdArena.create(4, LARGE.block_bytes)
    spec = TransportSpec(mover=preference)  # type: ignore[arg-type]
    server = DataServer(StrictLanding(), arena, LARGE, spec, TimeoutSpec(), "127.0.0.1")
    assert [e.mover for e in server.endpoints] == movers
    assert all(
        e.address.startswith("@" if e.mover == "shm" else "127.0.0.1:") for e in server.endpoints
    )
    assert server.close()
    arena.close()


@pytest.mark.parametrize(
    ("mover", "address"),
    [("tcp", ""), ("tcp", "127.0.0.1:"), ("tcp", "127.0.0.1:x"), ("shm", "@no"), ("nixl", "x")],
    ids=str,
)
def test_an_endpoint_that_is_none_is_a_failed_link(mover: str, address: str) -> None:
    with rig("tcp") as made:
        source = Source(made.source, made.layout, made.transport, made.timeouts)
        with pytest.raises(TransferFailed):
            open_link(DataEndpoint(mover, address), made.key, source, "decode-0")


def test_a_congestion_control_that_the_kernel_lacks_costs_nothing_but_speed() -> None:
    with rig("tcp") as made:
        spec = TransportSpec(congestion="no-such")
        source = Source(made.source, made.layout, spec, made.timeouts)
        open_link(made.endpoint, made.key, source, "decode-0").close()
