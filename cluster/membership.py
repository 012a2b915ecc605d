"""Who is in the cluster: one record per living incarnation, and the history of each slot.

The supervisor is the only writer.  Everything here can be rebuilt by looking at the actors
that run, except the history, whose loss only makes a restart sooner.  Pure: `now` is given.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from core.ids import Epoch, WorkerId
from core.messages import Fault, WorkerInfo
from core.states import WORKER, WorkerEvent, WorkerState, advance

STABLE_S = 10.0
"""A worker that was ready for this long starts its slot's history afresh when it dies."""


@dataclass(frozen=True, slots=True)
class Member:
    """One living incarnation.  since: when it entered `state`; info: known once it is ready."""

    worker_id: WorkerId
    epoch: Epoch
    state: WorkerState
    since: float
    info: WorkerInfo | None = None


@dataclass(frozen=True, slots=True)
class History:
    """What a slot's earlier incarnations tell: quick deaths in a row, the last one, and why."""

    failures: int
    died_at: float
    last_epoch: Epoch
    fault: Fault


class Membership:
    """Records by (worker, epoch); news of an incarnation that has no record is ignored."""

    def __init__(self, version: int = 0) -> None:
        self._members: dict[tuple[WorkerId, Epoch], Member] = {}
        self._history: dict[WorkerId, History] = {}
        self._peers: tuple[WorkerInfo, ...] = ()
        self._version = version

    @property
    def version(self) -> int:
        """Grows whenever `peers` changes."""
        return self._version

    @property
    def peers(self) -> tuple[WorkerInfo, ...]:
        """Workers that can be reached.  A draining one still is: its streams are running."""
        return self._peers

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def get(self, worker_id: WorkerId, epoch: Epoch) -> Member | None:
        return self._members.get((worker_id, epoch))

    def history(self, worker_id: WorkerId) -> History | None:
        return self._history.get(worker_id)

    def started(self, worker_id: WorkerId, epoch: Epoch, now: float) -> None:
        """An incarnation exists, started or found running."""
        self._members[worker_id, epoch] = Member(worker_id, epoch, WorkerState.STARTING, now)

    def registered(self, info: WorkerInfo, now: float) -> None:
        """It can be reached.  One that died meanwhile is ignored."""
        self._move(info.worker_id, info.epoch, WorkerEvent.REGISTER, now, info)

    def draining(self, worker_id: WorkerId, epoch: Epoch, now: float) -> None:
        self._move(worker_id, epoch, WorkerEvent.DRAIN, now, None)

    def died(self, worker_id: WorkerId, epoch: Epoch, fault: Fault, now: float) -> None:
        """It is gone for good.  Telling it twice counts once."""
        member = self._members.pop((worker_id, epoch), None)
        if member is None:
            return
        advance(WORKER, member.state, WorkerEvent.DIE)
        before = self._history.get(worker_id)
        lived = member.state is not WorkerState.STARTING and now - member.since >= STABLE_S
        failures = 1 if before is None or lived else before.failures + 1
        last = max(epoch, before.last_epoch) if before else epoch
        self._history[worker_id] = History(failures, now, last, fault)
        self._refresh()

    def _move(
        self,
        worker_id: WorkerId,
        epoch: Epoch,
        event: WorkerEvent,
        now: float,
        info: WorkerInfo | None,
    ) -> None:
        member = self.get(worker_id, epoch)
        if member is None:
            return
        state = advance(WORKER, member.state, event)
        moved = replace(member, state=state, since=now, info=info or member.info)
        self._members[worker_id, epoch] = moved
        self._refresh()

    def _refresh(self) -> None:
        infos = (member.info for member in self._members.values())
        peers = tuple(sorted((i for i in infos if i), key=lambda i: (i.worker_id, i.epoch)))
        if peers != self._peers:
            self._peers = peers
            self._version += 1
