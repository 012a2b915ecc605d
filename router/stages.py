"""A trace as durations: where the time of a request went.  Pure."""

from itertools import pairwise

from core.trace import Trace, TraceEvent

STAGES = {
    TraceEvent.RECEIVED: "edge",
    TraceEvent.PLACED: "queue",
    TraceEvent.RESERVED: "reserve",
    TraceEvent.PREFILL_ACCEPTED: "offer",
    TraceEvent.FIRST_TOKEN: "prefill",
    TraceEvent.PREFILL_DONE: "prefill",
    TraceEvent.TRANSFERRED: "transfer",
    TraceEvent.ATTACHED: "attach",
    TraceEvent.SECOND_TOKEN: "first_step",
    TraceEvent.RETRIED: "lost",
    TraceEvent.ENDED: "decode",
}
"""The stage that ends with an event.  "lost": what a failed attempt had begun."""


def durations(trace: Trace, arrived: float) -> dict[str, float]:
    """Seconds per stage since `arrived`; they sum to the time of the last event.

    A stage that retries repeated counts all its times.
    """
    marks = [(TraceEvent.RECEIVED, arrived), *trace.events]
    parts: dict[str, float] = {}
    for (_, begin), (event, end) in pairwise(marks):
        name = STAGES[event]
        parts[name] = parts.get(name, 0.0) + end - begin
    return parts
