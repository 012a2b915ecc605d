"""State machines as tables.  `advance` is the only way to move; an illegal move raises."""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from core.errors import InternalError


class RequestState(StrEnum):
    """A request as the router sees it."""

    RECEIVED = "received"
    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    ATTACHING = "attaching"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class RequestEvent(StrEnum):
    ADMIT = "admit"
    PLACE = "place"
    RESERVED = "reserved"
    LOCAL = "local"
    PREFILLED = "prefilled"
    ATTACHED = "attached"
    RETRY = "retry"
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"


class LeaseState(StrEnum):
    """Blocks of one worker reserved for one attempt, on the side that receives KV.

    QUARANTINED blocks belong to a lease that ended while a write was still landing;
    they are FREE only after the last writer reported.
    """

    RESERVED = "reserved"
    FILLING = "filling"
    COMMITTED = "committed"
    QUARANTINED = "quarantined"
    FREE = "free"


class LeaseEvent(StrEnum):
    WRITE = "write"
    COMMIT = "commit"
    END_BUSY = "end_busy"
    END_IDLE = "end_idle"
    FENCED = "fenced"


class SequenceState(StrEnum):
    """A sequence inside one engine."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    HANDOFF = "handoff"
    RUNNING = "running"
    DONE = "done"


class SequenceEvent(StrEnum):
    START = "start"
    PREFILLED = "prefilled"
    HAND_OVER = "hand_over"
    PREEMPT = "preempt"
    END = "end"


class WorkerState(StrEnum):
    """A worker as the supervisor sees it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class WorkerEvent(StrEnum):
    REGISTER = "register"
    DRAIN = "drain"
    DIE = "die"


_R, _RE = RequestState, RequestEvent
_LIVE_REQUEST = (_R.RECEIVED, _R.QUEUED, _R.RESERVING, _R.PREFILLING, _R.ATTACHING, _R.DECODING)

REQUEST: Mapping[tuple[RequestState, RequestEvent], RequestState] = {
    (_R.RECEIVED, _RE.ADMIT): _R.QUEUED,
    (_R.QUEUED, _RE.PLACE): _R.RESERVING,
    (_R.RESERVING, _RE.RESERVED): _R.PREFILLING,
    (_R.RESERVING, _RE.LOCAL): _R.DECODING,
    (_R.PREFILLING, _RE.PREFILLED): _R.ATTACHING,
    (_R.PREFILLING, _RE.FINISH): _R.FINISHED,
    (_R.ATTACHING, _RE.ATTACHED): _R.DECODING,
    (_R.DECODING, _RE.FINISH): _R.FINISHED,
    **{(s, _RE.RETRY): _R.QUEUED for s in _LIVE_REQUEST[2:]},
    **{(s, _RE.FAIL): _R.FAILED for s in _LIVE_REQUEST},
    **{(s, _RE.CANCEL): _R.CANCELLED for s in _LIVE_REQUEST},
}
"""A lease is reserved before prefill starts (early binding); LOCAL means one worker does both.
FINISH out of PREFILLING: the first token was also the last."""

_L, _LE = LeaseState, LeaseEvent
LEASE: Mapping[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (_L.RESERVED, _LE.WRITE): _L.FILLING,
    (_L.FILLING, _LE.WRITE): _L.FILLING,
    (_L.RESERVED, _LE.COMMIT): _L.COMMITTED,
    (_L.FILLING, _LE.COMMIT): _L.COMMITTED,
    (_L.RESERVED, _LE.END_IDLE): _L.FREE,
    (_L.FILLING, _LE.END_IDLE): _L.FREE,
    (_L.FILLING, _LE.END_BUSY): _L.QUARANTINED,
    (_L.QUARANTINED, _LE.FENCED): _L.FREE,
}
"""COMMITTED is an end here: its blocks belong to a sequence from then on."""

_S, _SE = SequenceState, SequenceEvent
SEQUENCE: Mapping[tuple[SequenceState, SequenceEvent], SequenceState] = {
    (_S.WAITING, _SE.START): _S.PREFILLING,
    (_S.PREFILLING, _SE.PREFILLED): _S.RUNNING,
    (_S.PREFILLING, _SE.HAND_OVER): _S.HANDOFF,
    (_S.PREFILLING, _SE.PREEMPT): _S.WAITING,
    (_S.RUNNING, _SE.PREEMPT): _S.WAITING,
    **{(s, _SE.END): _S.DONE for s in (_S.WAITING, _S.PREFILLING, _S.HANDOFF, _S.RUNNING)},
}

_W, _WE = WorkerState, WorkerEvent
WORKER: Mapping[tuple[WorkerState, WorkerEvent], WorkerState] = {
    (_W.STARTING, _WE.REGISTER): _W.READY,
    (_W.READY, _WE.DRAIN): _W.DRAINING,
    **{(s, _WE.DIE): _W.DEAD for s in (_W.STARTING, _W.READY, _W.DRAINING)},
}
"""DEAD is final: a restart is a new epoch, hence a new record."""

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


def advance(table: Mapping[tuple[S, E], S], state: S, event: E) -> S:
    """The state after `event`.  Raises InternalError when the table has no such move."""
    try:
        return table[state, event]
    except KeyError:
        raise InternalError(f"illegal transition: {event} in state {state}") from None
