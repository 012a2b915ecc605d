"""A prefill worker's connection to one decode worker: a gRPC session and its data links."""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from actors.handoff import PeerKey
from core.errors import DeadlineExceeded, Stage, TransferFailed, TriremeError, WorkerLost
from core.ids import WorkerId
from core.kvlayout import Compatibility
from core.messages import WIRE_VERSION, Abort, Event, Hello, HostFacts
from core.ports import MoveReport, MoveState, Ticket
from transport.choose import choose
from transport.link import DataLink, Source, open_link
from transport.session_client import ClientSession

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Local:
    """What this worker brings to every connection.  counters: shared, for the report."""

    worker_id: WorkerId
    compat: Compatibility
    host: HostFacts
    source: Source
    loop: asyncio.AbstractEventLoop
    counters: Counter[str]


class PeerConnection:
    """`actors.handoff.Peer`.  Used by one sender thread; the session lives on the event loop."""

    def __init__(self, local: Local, peer: PeerKey, address: str) -> None:
        """Connect, compare the compatibility records, open the best data link.

        Raises WorkerLost, DeadlineExceeded, Incompatible, ConfigError or TransferFailed.
        """
        self._local = local
        self._worker, epoch = peer
        self._lost = threading.Event()
        self._links: list[DataLink] = []
        hello = Hello(WIRE_VERSION, local.worker_id, epoch, local.compat, local.host)
        limit_s = local.source.timeouts.connect_s
        self._session = self._on_loop(
            ClientSession.connect(
                address, hello, _ignore, self._on_lost, limit_s, local.source.faults
            ),
            limit_s,
        )
        try:
            welcome = self._session.welcome
            welcome.compat.check(local.compat, self._worker)
            preference = local.source.transport.mover
            self._movers = choose(local.host, welcome.host, welcome.endpoints, preference)
            self._open_best()
        except TriremeError:
            self.close()
            raise

    def push(self, ticket: Ticket) -> MoveReport:
        """One push; a backend that fails is left, and the rest goes over the next one, once."""
        if self._lost.is_set():
            return self._failed("the session with it ended")
        report = self._links[-1].push(ticket, self._local.source.timeouts.transfer_s)
        if report.state is not MoveState.FAILED or not self._step_down(report.reason):
            return report
        landed = report.bytes // self._local.source.layout.block_bytes
        rest = replace(
            ticket,
            first_index=ticket.first_index + landed,
            block_ids=ticket.block_ids[landed:],
            generations=ticket.generations[landed:],
        )
        again = self._links[-1].push(rest, self._local.source.timeouts.transfer_s)
        return replace(again, bytes=again.bytes + report.bytes)

    def abort(self, notice: Abort) -> None:
        try:
            self._on_loop(self._session.notify(notice), self._local.source.timeouts.call_s)
        except TriremeError as e:
            log.info("%s did not hear of the abort, its lease will expire: %s", self._worker, e)

    def close(self) -> None:
        """Returns when no byte can land any more."""
        for link in self._links:
            link.close()
        try:
            self._on_loop(self._session.close(), self._local.source.timeouts.connect_s)
        except TriremeError as e:
            log.info("the session with %s was not closed in order: %s", self._worker, e)

    def _open_best(self) -> None:
        """Open the first backend that works.  Raises TransferFailed when none does."""
        welcome = self._session.welcome
        endpoints = {e.mover: e for e in welcome.endpoints}
        failures: list[str] = []
        while self._movers:
            mover, self._movers = self._movers[0], self._movers[1:]
            try:
                link = open_link(
                    endpoints[mover], welcome.link_key, self._local.source, self._worker
                )
            except TransferFailed as e:
                log.warning("%s: %s", self._worker, e)
                failures.append(e.message)
                continue
            if self._links or failures:
                self._local.counters["mover_fallbacks"] += 1
                log.warning("moving to %s over %s from now on", self._worker, mover)
            self._links.append(link)
            return
        raise TransferFailed(
            f"no data backend works: {'; '.join(failures) or 'none is left'}",
            stage=Stage.TRANSFER,
            worker=self._worker,
        )

    def _step_down(self, reason: str) -> bool:
        """Whether there is another backend; it is open then."""
        log.warning("push to %s over %s failed: %s", self._worker, self._links[-1].name, reason)
        self._links[-1].close()
        try:
            self._open_best()
        except TransferFailed as e:
            log.warning("%s", e)
            return False
        return True

    def _failed(self, why: str) -> MoveReport:
        return MoveReport(MoveState.FAILED, self._links[-1].name, reason=f"{self._worker}: {why}")

    def _on_lost(self, reason: str) -> None:
        """The peer is gone or cut off: wake a running push at once."""
        self._lost.set()
        for link in self._links:
            threading.Thread(target=link.close, name=f"fence-{self._worker}", daemon=True).start()
        log.warning("worker session with %s ended: %s", self._worker, reason)

    def _on_loop(self, work: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Run on the event loop from this thread.  Raises what it raises, or DeadlineExceeded."""
        if not self._local.loop.is_running():
            work.close()
            raise WorkerLost("this worker is stopping", stage=Stage.TRANSFER)
        future = asyncio.run_coroutine_threadsafe(work, self._local.loop)
        try:
            return future.result(limit_s + 1.0)
        except TimeoutError:
            future.cancel()
            raise DeadlineExceeded(
                f"{self._worker} did not answer within {limit_s} s; is it alive?",
                stage=Stage.TRANSFER,
                worker=self._worker,
            ) from None


def _ignore(event: Event) -> None:
    """A worker has no use for the reports of another."""
