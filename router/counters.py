"""What the dispatcher counts, for metrics and /status.  Values only grow."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """requests: by outcome ("finished", "cancelled" or an error code).  retries: by the stage
    that failed.  degraded: by kind.  cancels: sent to workers for attempts given up.
    unknown_events: for attempts that are over; some are normal after a cancel.

    Plain dicts and integers, so that `dataclasses.asdict` gives JSON.
    """

    requests: dict[str, int] = field(default_factory=dict)
    retries: dict[str, int] = field(default_factory=dict)
    degraded: dict[str, int] = field(default_factory=dict)
    refusals: int = 0
    cancels: int = 0
    cancel_errors: int = 0
    unknown_events: int = 0


def count_one(by_name: dict[str, int], name: str) -> None:
    by_name[name] = by_name.get(name, 0) + 1
