"""Ctrl-C and SIGTERM mean the same: stop in order, and the second time at once."""

import signal
import time

DOUBLE_S = 0.5
"""`timeout` and some init systems deliver one stop twice; this close together they are one."""


class Interrupts:
    """A signal handler of the main thread that raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self._last = float("-inf")

    def __call__(self, _number: int, _frame: object) -> None:
        now = time.monotonic()
        if now - self._last >= DOUBLE_S:
            self._last = now
            raise KeyboardInterrupt

    @classmethod
    def install(cls) -> None:
        """For both signals.  To be called after `ray.init`, which takes SIGTERM for itself."""
        handler = cls()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, handler)
