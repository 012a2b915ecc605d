"""What to do next: desired slots × membership → actions.  Pure; the supervisor acts.

One rule for every situation: each slot has exactly one living incarnation, the newest; whoever
is not it is stopped.  So finding strangers or doubles after a restart needs no case of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cluster.layout import WorkerSlot
from cluster.membership import History, Membership
from core.ids import Epoch, WorkerId
from core.states import WorkerState

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 10.0


@dataclass(frozen=True, slots=True)
class Start:
    slot: WorkerSlot
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Stop:
    worker_id: WorkerId
    epoch: Epoch


Action: TypeAlias = Start | Stop


def plan(
    desired: Sequence[WorkerSlot], members: Membership, now: float, wall_ns: int
) -> tuple[Action, ...]:
    """Actions due at `now` (monotonic seconds).

    wall_ns (nanoseconds since 1970) becomes the epoch of what starts: larger than any before
    it, also across a restart of the supervisor.
    """
    wanted = {slot.worker_id for slot in desired}
    newest: dict[WorkerId, Epoch] = {}
    for member in members:
        newest[member.worker_id] = max(member.epoch, newest.get(member.worker_id, Epoch(0)))
    stops = tuple(
        Stop(m.worker_id, m.epoch)
        for m in members
        if m.state is not WorkerState.DRAINING
        and (m.worker_id not in wanted or m.epoch < newest[m.worker_id])
    )
    starts = tuple(
        Start(slot, _epoch(members.history(slot.worker_id), wall_ns))
        for slot in desired
        if slot.worker_id not in newest and due(members.history(slot.worker_id)) <= now
    )
    return stops + starts


def due(history: History | None) -> float:
    """When the slot may start again (monotonic seconds).

    At once after a first death, then after 0.5, 1, 2, … 10 s while it keeps dying early.
    """
    if history is None or history.failures <= 1:
        return float("-inf") if history is None else history.died_at
    doublings = min(history.failures - 2, 16)
    return history.died_at + min(MAX_DELAY_S, FIRST_DELAY_S * 2.0**doublings)


def idle_s(desired: Sequence[WorkerSlot], members: Membership, now: float) -> float | None:
    """Seconds until `plan` will have something new by the clock alone; None: never."""
    alive = {member.worker_id for member in members}
    waits = [
        due(members.history(slot.worker_id)) - now
        for slot in desired
        if slot.worker_id not in alive
    ]
    return max(0.0, min(waits)) if waits else None


def _epoch(history: History | None, wall_ns: int) -> Epoch:
    return Epoch(max(wall_ns, history.last_epoch + 1 if history else 1))
