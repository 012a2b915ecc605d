"""Life-cycle event names and the one record they are kept in, for production and simulation."""

from dataclasses import dataclass, field
from enum import StrEnum


class TraceEvent(StrEnum):
    RECEIVED = "received"
    PLACED = "placed"
    RESERVED = "reserved"
    PREFILL_ACCEPTED = "prefill_accepted"
    PREFILL_DONE = "prefill_done"
    FIRST_TOKEN = "first_token"
    TRANSFERRED = "transferred"
    ATTACHED = "attached"
    SECOND_TOKEN = "second_token"
    RETRIED = "retried"
    ENDED = "ended"


@dataclass(slots=True)
class Trace:
    """Timestamps of one request, all from the clock of the edge (seconds)."""

    events: list[tuple[TraceEvent, float]] = field(default_factory=list)

    def mark(self, event: TraceEvent, now: float) -> None:
        self.events.append((event, now))

    def first(self, event: TraceEvent) -> float | None:
        return next((at for name, at in self.events if name is event), None)

    def last(self, event: TraceEvent) -> float | None:
        return next((at for name, at in reversed(self.events) if name is event), None)
