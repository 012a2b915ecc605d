"""Time as an argument: pure code is handed a `Clock`, or a `now` in seconds."""

from collections.abc import Callable

Clock = Callable[[], float]
"""Monotonic seconds.  Production passes `time.monotonic`."""


class ManualClock:
    """A clock that moves only when told to; used by tests and the simulator."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward.  Raises ValueError on a negative step: time is monotonic."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now += seconds
