"""What follows the error that ended an attempt.  Pure."""

from dataclasses import dataclass
from typing import TypeAlias

from core.errors import (
    DeadlineExceeded,
    Incompatible,
    LeaseGone,
    Refused,
    Stage,
    TransferFailed,
    TriremeError,
)
from core.ids import WorkerId
from router.plan import Placement


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt that failed.  accepted: its prefill worker had taken the job.

    attempts: tries so far, this one included; refusals do not count, they cost nothing.
    """

    error: TriremeError
    placement: Placement
    accepted: bool
    attempts: int


@dataclass(frozen=True, slots=True)
class Next:
    """`worker` has no room; try the next candidate, wait when there is none."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Again:
    """Start over, on other workers than `avoid` where there are others."""

    avoid: WorkerId | None = None


@dataclass(frozen=True, slots=True)
class Recompute:
    """Prefill and decode on `worker`: moving KV is what failed."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends with this error."""

    error: TriremeError


Verdict: TypeAlias = Next | Again | Recompute | Fail


def decide(ended: Ended, max_attempts: int) -> Verdict:
    error = ended.error
    if isinstance(error, Refused) and not ended.accepted:
        return Next(WorkerId(error.worker))
    pair_failed = isinstance(error, TransferFailed | Incompatible) or (
        isinstance(error, DeadlineExceeded) and error.stage is Stage.TRANSFER
    )
    if ended.attempts >= max_attempts or not (error.retryable or pair_failed):
        return Fail(error)
    if pair_failed:
        return Recompute(ended.placement.decode)
    if isinstance(error, LeaseGone):
        return Again()
    return Again(WorkerId(error.worker))
