"""Hands finished prefill blocks to the decode workers that granted leases for them.

        engine thread            sender thread (one per peer)            peer
        ReadyBlocks ──queue──▶ Peer.push(ticket) ════════════▶ lands in its own pool
        moved(blocks) ◀──────── terminal report ◀────────────── ack
        PrefillDone / AttemptFailed ──▶ the session that asked

Lent blocks go back to the engine through `moved` alone, after the mover's terminal report.
"""

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from core.clock import Clock
from core.errors import LeaseGone, Stage, TransferFailed, TriremeError
from core.ids import AttemptKey, BlockId, Epoch, WorkerId
from core.messages import Abort, AttemptFailed, Event, Fault, PrefillDone
from core.ports import EnginePort, MoveReport, MoveState, ReadyBlocks, Ticket

log = logging.getLogger(__name__)

PeerKey: TypeAlias = tuple[WorkerId, Epoch]


class Peer(Protocol):
    """One incarnation of a decode worker as a sender sees it."""

    def push(self, ticket: Ticket) -> MoveReport:
        """Blocks until the terminal report; steps down to the next backend once."""
        ...

    def abort(self, notice: Abort) -> None:
        """Tell the peer that a lease will not be filled.  Best effort, returns at once."""
        ...

    def close(self) -> None: ...


Connect: TypeAlias = Callable[[PeerKey, str], Peer]
"""(peer, address) -> a connected Peer, within a deadline.  Raises TriremeError."""


@dataclass(slots=True)
class _Totals:
    """What one attempt has moved so far."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    mover: str = ""


class _Sender:
    """One thread that pushes to one peer, first come first served."""

    def __init__(self, connect: Callable[[], Peer], name: str) -> None:
        self._connect = connect
        self._peer: Peer | None = None
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"send-{name}", daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        self._queue.put(task)

    def stop(self) -> None:
        """After what was submitted; `ended` waits for it."""
        self._queue.put(None)

    def ended(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def peer(self) -> Peer:
        """Connected, on this sender's thread.  Raises TriremeError."""
        if self._peer is None:
            self._peer = self._connect()
        return self._peer

    def tell(self, notice: Abort) -> None:
        """A peer that was never reached has nothing to forget but a lease, which expires."""
        if self._peer is not None:
            self._peer.abort(notice)

    def disconnect(self) -> None:
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            task()
        self.disconnect()


class Handoff:
    """All senders of one worker.  Every method may be called from any thread."""

    def __init__(
        self,
        connect: Connect,
        emit: Callable[[str, Event], None],
        worker_id: WorkerId,
        clock: Clock,
        send_out: Callable[[Sequence[BlockId]], Callable[[], None]],
    ) -> None:
        """send_out: `engine.device.staging.Staging.send_out`."""
        self.counters: Counter[str] = Counter()
        self._connect = connect
        self._emit = emit
        self._worker_id = worker_id
        self._clock = clock
        self._send_out = send_out
        self._senders: dict[PeerKey, _Sender] = {}
        self._totals: dict[AttemptKey, _Totals] = {}
        self._lock = threading.Lock()
        self._engine: EnginePort | None = None

    def bind(self, engine: EnginePort) -> None:
        """The engine that lends the blocks; its sink calls `submit`, hence after it exists."""
        self._engine = engine

    def submit(self, ready: ReadyBlocks) -> None:
        grant, sent_out = ready.grant, self._send_out(ready.block_ids)
        with self._lock:
            sender = self._sender((grant.worker_id, grant.epoch), grant.address)
            sender.submit(partial(self._deliver, sender, ready, sent_out))

    def warm(self, peer: PeerKey, address: str) -> None:
        """Pay for a connection now and not with a user's first request."""
        with self._lock:
            sender = self._sender(peer, address)
            sender.submit(partial(self._warm, sender))

    def keep(self, peers: set[PeerKey]) -> None:
        """Stop the senders of every other incarnation: it is dead."""
        with self._lock:
            for key in [k for k in self._senders if k not in peers]:
                self._senders.pop(key).stop()

    def close(self, timeout_s: float) -> bool:
        """Stop all senders; False when one is still at a push after `timeout_s`."""
        with self._lock:
            senders = tuple(self._senders.values())
        self.keep(set())
        end = self._clock() + timeout_s
        still = [s for s in senders if not s.ended(max(0.0, end - self._clock()))]
        return not still

    @property
    def healthy(self) -> bool:
        """Whether every sender lives; blocks lent to a dead one would never come back."""
        with self._lock:
            return not any(s.ended(0.0) for s in self._senders.values())

    def prune(self) -> None:
        """Forget totals of attempts that were cancelled between two pushes."""
        assert self._engine is not None
        for key in [k for k in tuple(self._totals) if not self._engine.holds(k)]:
            self._totals.pop(key, None)

    def _sender(self, peer: PeerKey, address: str) -> _Sender:
        """With the lock held: what is submitted must come before a stop."""
        if peer not in self._senders:
            connect = partial(self._connect, peer, address)
            self._senders[peer] = _Sender(connect, f"{peer[0]}@{peer[1]}")
        return self._senders[peer]

    def _warm(self, sender: _Sender) -> None:
        try:
            sender.peer()
        except TriremeError as e:
            log.warning("no data link yet, it will be tried again when needed: %s", e)

    def _deliver(self, sender: _Sender, ready: ReadyBlocks, sent_out: Callable[[], None]) -> None:
        assert self._engine is not None
        sent_out()
        if not self._engine.holds(ready.key):
            self._totals.pop(ready.key, None)
            self._engine.moved(ready.key, ready.block_ids, ready.last)
            return
        error = self._push(sender, ready)
        self._engine.moved(ready.key, ready.block_ids, ready.last and error is None)
        if error is not None:
            self._give_up(sender, ready, error)
        elif ready.last:
            self._finish(ready)

    def _push(self, sender: _Sender, ready: ReadyBlocks) -> TriremeError | None:
        if not ready.block_ids:
            return None
        started = self._clock()
        try:
            report = sender.peer().push(_ticket(ready))
        except TriremeError as e:
            return e
        if report.state is not MoveState.DONE:
            return _error(report, ready.grant.worker_id)
        totals = self._totals.setdefault(ready.key, _Totals())
        totals.blocks += len(ready.block_ids)
        totals.bytes += report.bytes
        totals.seconds += self._clock() - started
        totals.mover = report.mover
        self.counters[f"moved_blocks_{report.mover}"] += len(ready.block_ids)
        self.counters[f"moved_bytes_{report.mover}"] += report.bytes
        return None

    def _finish(self, ready: ReadyBlocks) -> None:
        assert ready.first is not None
        totals = self._totals.pop(ready.key, _Totals())
        done = PrefillDone(
            key=ready.key,
            first=ready.first,
            cached_tokens=ready.cached_tokens,
            expert_counts=ready.expert_counts,
            moved_blocks=totals.blocks,
            moved_bytes=totals.bytes,
            mover=totals.mover,
            queue_s=ready.queue_s,
            prefill_s=ready.prefill_s,
            transfer_s=totals.seconds,
        )
        self._emit(ready.owner, done)

    def _give_up(self, sender: _Sender, ready: ReadyBlocks, error: TriremeError) -> None:
        assert self._engine is not None
        self._totals.pop(ready.key, None)
        self.counters["handoffs_failed"] += 1
        log.warning("hand-over of %s to %s failed: %s", ready.key, ready.grant.worker_id, error)
        self._engine.cancel(ready.key)
        self._emit(ready.owner, AttemptFailed(ready.key, Fault.of(error, self._worker_id)))
        sender.tell(Abort(ready.key, ready.grant.lease_id, error.message))
        if isinstance(error, TransferFailed):
            sender.disconnect()


def _ticket(ready: ReadyBlocks) -> Ticket:
    return Ticket(
        key=ready.key,
        lease_id=ready.grant.lease_id,
        epoch=ready.grant.epoch,
        first_index=ready.first_index,
        block_ids=ready.block_ids,
        generations=ready.generations,
    )


def _error(report: MoveReport, worker: WorkerId) -> TriremeError:
    if report.state is MoveState.GONE:
        return LeaseGone(
            f"the lease ended while its blocks were on the way: {report.reason}; reserve again",
            stage=Stage.TRANSFER,
            worker=worker,
        )
    return TransferFailed(
        f"moving blocks over {report.mover} failed: {report.reason}",
        stage=Stage.TRANSFER,
        worker=worker,
    )
