"""The step of a gang: the leader sends the plan, and all ranks run it at once.

    scheduler ─plan─▶ GangRunner ─bytes─▶ follow      on every other rank
                          │                  │
                       Runner ◀══ sums ══▶ Runner     one process each

Only the leader schedules, chooses tokens and counts experts.
"""

from collections.abc import Callable

from core.errors import InternalError, Stage
from engine.device.runner import Runner
from engine.parallel.wire import decode, encode
from engine.policy.plan import Plan, Sampled


class GangRunner:
    """`engine.loop.StepRunner` of the leader."""

    def __init__(self, own: Runner, send: Callable[[bytes], None]) -> None:
        """send: to every other rank.  Raises WorkerLost."""
        self._own = own
        self._send = send

    def run(self, plan: Plan) -> list[Sampled | None]:
        """Raises WorkerLost or InternalError, both of which end the worker: after half a step the
        ranks would add up sums of different steps."""
        self._send(encode(plan))
        try:
            return self._own.run(plan)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise InternalError(
                f"rank 0 failed in the middle of a step: {error}; the whole worker must start "
                "afresh",
                stage=Stage.DECODE,
            ) from error


def follow(own: Runner, receive: Callable[[], bytes | None]) -> None:
    """Run what the leader runs, until it is gone (`receive` says None).  Raises WorkerLost."""
    while (body := receive()) is not None:
        own.run(decode(body))
