"""Who may come in and who may wait.  Pure: the answer is the error to raise, or None for yes."""

from core.errors import Overloaded, Stage, TriremeError, Unavailable

RETRY_AFTER_S = 1.0
"""What a client that was turned away is told to wait."""


def admit(workers: int, waiting: int, max_waiting: int) -> TriremeError | None:
    """A new request.  workers: that take new work; waiting: requests parked before this one."""
    if not workers:
        return _unavailable("no worker is ready to take requests; retry when one has started")
    return park(waiting, max_waiting) if waiting else None


def park(waiting: int, max_waiting: int) -> Overloaded | None:
    """A request that every worker refused wants to wait."""
    if waiting < max_waiting:
        return None
    return Overloaded(
        f"all workers are busy and {waiting} requests wait already; retry later, add workers "
        "or raise router.max_waiting",
        stage=Stage.QUEUE,
        retry_after_s=RETRY_AFTER_S,
    )


def expired(workers: int, queue_s: float, refusal: str) -> TriremeError:
    """A parked request has waited for `queue_s`; refusal: the last reason a worker gave."""
    if not workers:
        return _unavailable(
            f"no worker became ready within {queue_s:g} s; retry when one has started"
        )
    return Overloaded(
        f"no worker accepted the request within {queue_s:g} s"
        f"{f' (last refusal: {refusal})' if refusal else ''}; retry later or add workers",
        stage=Stage.QUEUE,
        retry_after_s=RETRY_AFTER_S,
    )


def _unavailable(message: str) -> Unavailable:
    return Unavailable(message, stage=Stage.QUEUE, retry_after_s=RETRY_AFTER_S)
