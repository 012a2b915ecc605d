"""A source and a destination of the data plane in one process, and a strict landing."""

import contextlib
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from core.errors import LeaseGone
from core.ids import AttemptKey, BlockId, Epoch, LeaseId, RequestId
from core.kvlayout import KVLayout
from core.messages import DataEndpoint
from core.ports import Ticket
from core.spec import FaultSpec, TimeoutSpec, TransportSpec
from transport import data_hello, shm, tcp
from transport import frame as frames
from transport.arena import MemfdArena
from transport.data_server import DataServer
from transport.data_socket import DataSocket
from transport.faulty import FaultInjector
from transport.frame import Answer, Frame, Kind
from transport.link import DataLink, Source, open_link

SMALL = KVLayout(layers=2, kv_heads=1, block_size=4, head_dim=16, dtype="float32")  # 1 KiB blocks
LARGE = KVLayout(layers=8, kv_heads=4, block_size=16, head_dim=64, dtype="float32")  # 256 KiB
EPOCH = Epoch(7)
MOVERS = ("shm", "tcp")


@dataclass
class Lease:
    blocks: tuple[int, ...]
    epoch: Epoch
    landed: set[int] = field(default_factory=set)


class StrictLanding:
    """Fails the connection on an `end` without `begin`; keeps what is in between in `active`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.leases: dict[LeaseId, Lease] = {}
        self.active: list[tuple[LeaseId, int, int]] = []
        self.ends: list[bool] = []
        self.begins = 0
        self.on_begin: Callable[[], None] = lambda: None

    def reserve(self, blocks: tuple[int, ...], epoch: Epoch = EPOCH) -> LeaseId:
        lease_id = LeaseId(secrets.token_hex(8))
        with self._lock:
            self.leases[lease_id] = Lease(blocks, epoch)
        return lease_id

    def revoke(self, lease_id: LeaseId) -> None:
        with self._lock:
            del self.leases[lease_id]

    def begin(
        self, lease_id: LeaseId, epoch: Epoch, first_index: int, count: int
    ) -> tuple[BlockId, ...]:
        places = set(range(first_index, first_index + count))
        with self._lock:
            lease = self.leases.get(lease_id)
            if lease is None or lease.epoch != epoch or max(places) >= len(lease.blocks):
                raise LeaseGone(f"no lease {lease_id} of epoch {epoch} with these places")
            if places & lease.landed:
                raise LeaseGone("these places have landed already")
            self.active.append((lease_id, first_index, count))
            self.begins += 1
        self.on_begin()
        return tuple(BlockId(b) for b in lease.blocks[first_index : first_index + count])

    def end(self, lease_id: LeaseId, first_index: int, count: int, ok: bool) -> None:
        with self._lock:
            self.active.remove((lease_id, first_index, count))
            self.ends.append(ok)
            if ok and lease_id in self.leases:
                self.leases[lease_id].landed |= set(range(first_index, first_index + count))

    def settled(self) -> bool:
        """Every begin has had its end."""
        with self._lock:
            return not self.active and len(self.ends) == self.begins


def eventually(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def filled(arena: MemfdArena, seed: int) -> MemfdArena:
    arena.blocks[:] = random.Random(seed).randbytes(len(arena.blocks))
    return arena


def ticket(
    source: MemfdArena, lease_id: LeaseId, ids: tuple[int, ...], first: int = 0, **kw: object
) -> Ticket:
    generations = tuple(source.generations[i] if i < len(source.generations) else 0 for i in ids)
    values = {"epoch": EPOCH, "generations": generations} | kw
    return Ticket(
        key=AttemptKey(RequestId("r"), 0),
        lease_id=lease_id,
        first_index=first,
        block_ids=tuple(BlockId(i) for i in ids),
        **values,  # type: ignore[arg-type]
    )


@dataclass
class Rig:
    mover: str
    layout: KVLayout
    source: MemfdArena
    target: MemfdArena
    landing: StrictLanding
    server: DataServer
    faults: FaultInjector
    transport: TransportSpec
    timeouts: TimeoutSpec
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    @property
    def endpoint(self) -> DataEndpoint:
        return next(e for e in self.server.endpoints if e.mover == self.mover)

    def link(self, key: bytes = b"", layout: KVLayout | None = None) -> DataLink:
        source = Source(
            self.source, layout or self.layout, self.transport, self.timeouts, self.faults
        )
        return open_link(self.endpoint, key or self.key, source, "decode-0")

    def inject(self, **rule: object) -> None:
        self.faults.set((FaultSpec(on="data", **rule),))  # type: ignore[arg-type]

    def ticket(
        self, lease_id: LeaseId, ids: tuple[int, ...], first: int = 0, **kw: object
    ) -> Ticket:
        return ticket(self.source, lease_id, ids, first, **kw)

    def counter(self, name: str) -> int:
        return next((c.value for c in self.server.counters() if c.name == name), 0)

    def expect(self, placed: dict[int, int]) -> None:
        """The target holds source block s at each {target: s} and zeros everywhere else."""
        size = self.layout.block_bytes
        wanted = bytearray(len(self.target.blocks))
        for target, source in placed.items():
            wanted[target * size : (target + 1) * size] = self.source.block(source)
        assert bytes(self.target.blocks) == bytes(wanted)


@contextlib.contextmanager
def rig(
    mover: str,
    layout: KVLayout = SMALL,
    blocks: int = 64,
    checksum: bool = True,
    timeouts: TimeoutSpec | None = None,
) -> Iterator[Rig]:
    with contextlib.ExitStack() as stack:
        source = filled(MemfdArena.create(blocks, layout.block_bytes), seed=1)
        stack.callback(source.close)
        target = MemfdArena.create(blocks, layout.block_bytes)
        stack.callback(target.close)
        landing = StrictLanding()
        transport = TransportSpec(checksum=checksum)
        timeouts = timeouts or TimeoutSpec()
        server = DataServer(landing, target, layout, transport, timeouts, "127.0.0.1")
        stack.callback(server.close)
        made = Rig(
            mover, layout, source, target, landing, server, FaultInjector(), transport, timeouts
        )
        server.admit("prefill-0", made.key)
        yield made
        assert server.close()
        assert landing.settled()


class RawPeer:
    """A source that opens a connection properly and then sends whatever a test wants."""

    def __init__(self, made: Rig, fd: int = -1) -> None:
        self.made = made
        self.deadline = time.monotonic() + 10
        if made.mover == "shm":
            sock = shm.dial(made.endpoint.address, 5.0)
        else:
            sock = tcp.dial(made.endpoint.address, "", 5.0)
        self.socket = DataSocket(sock)
        challenge = self.socket.receive(data_hello.CHALLENGE_BYTES, self.deadline)
        hello = data_hello.encode_hello(made.source.geometry, made.key, challenge, made.mover)
        if made.mover == "shm":
            socket.send_fds(sock, [hello], [fd if fd >= 0 else made.source.fd])
        else:
            self.socket.send([hello], self.deadline)
        self.greeting = self.answer()

    def frame(self, lease_id: LeaseId, ids: tuple[int, ...], **kw: object) -> Frame:
        inline = len(ids) * self.made.layout.block_bytes if self.made.mover == "tcp" else 0
        values: dict[str, object] = {
            "kind": Kind.BLOCKS,
            "sequence": 1,
            "lease_id": lease_id,
            "epoch": EPOCH,
            "layout": self.made.layout.digest,
            "first_index": 0,
            "block_ids": ids,
            "generations": tuple(0 for _ in ids),
            "inline_bytes": inline,
        }
        return Frame(**(values | kw))  # type: ignore[arg-type]

    def send(self, frame: Frame, payload: bytes | None = None) -> None:
        body = bytes(frame.inline_bytes) if payload is None else payload
        self.socket.send([frames.encode(frame), body], self.deadline)

    def answer(self) -> Answer:
        head = self.socket.receive(frames.ANSWER_BYTES, self.deadline)
        reason = self.socket.receive(frames.reason_bytes(head), self.deadline)
        return frames.decode_answer(head, reason)

    def close(self) -> None:
        self.socket.close()
