"""Injected faults: which message is hit is decided here, purely; senders apply the action.

Messages: `transport/outbox.py` asks for every frame a session sends, by class name.  Data plane:
asks for "data", one per push.  The same rules over the same messages hit the same ones.
"""

import os
import signal
from collections.abc import Callable, Sequence
from threading import Lock

from core.spec import FaultSpec

DATA = "data"
"""What the data plane calls its frames; a rule on "*" means messages and leaves data alone."""


def _kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class FaultInjector:
    """Rules with their counts.  Thread-safe: sessions and movers of a process share one.

    kill: how to die; a test that must survive passes its own.
    """

    def __init__(
        self, rules: Sequence[FaultSpec] = (), kill: Callable[[], None] | None = None
    ) -> None:
        self.kill = kill or _kill_this_process
        self._lock = Lock()
        self.set(rules)

    def set(self, rules: Sequence[FaultSpec]) -> None:
        """Replace the rules; counting starts anew."""
        with self._lock:
            self._rules = tuple(rules)
            self._seen = [0] * len(self._rules)
            self._hits = [0] * len(self._rules)

    @property
    def active(self) -> bool:
        """Whether there is any rule; senders skip the question when there is none."""
        return bool(self._rules)

    @property
    def hits(self) -> tuple[int, ...]:
        """How many messages each rule has hit, in the order of the rules."""
        with self._lock:
            return tuple(self._hits)

    def decide(self, name: str) -> FaultSpec | None:
        """The rule that hits this message, a class name or `DATA`; None lets it pass.

        The first due rule wins, and rules after it do not see the message.
        """
        if not self._rules:
            return None
        with self._lock:
            for i, rule in enumerate(self._rules):
                if rule.on == name or (rule.on == "*" and name != DATA):
                    self._seen[i] += 1
                    beyond = self._seen[i] - rule.skip
                    if beyond > 0 and (rule.count == 0 or beyond <= rule.count):
                        self._hits[i] += 1
                        return rule
        return None


def truncated(frame: bytes) -> bytes:
    """The first half of the frame."""
    return frame[: len(frame) // 2]


def corrupted(frame: bytes) -> bytes:
    """The frame with its middle byte inverted.  Raises IndexError on an empty one."""
    broken = bytearray(frame)
    broken[len(broken) // 2] ^= 0xFF
    return bytes(broken)
