"""Which calls of a session have been run: at most once each, however often they arrive.  Pure."""

from collections import OrderedDict
from typing import Generic, TypeVar

R = TypeVar("R")


class CallLog(Generic[R]):
    """Ids of running calls, and the replies of the last `remembered` answered ones.

    Calls may overtake each other.  One so late that its id is below that of a forgotten call
    cannot be told from a repetition and is not run: its caller's deadline handles it.
    """

    def __init__(self, remembered: int) -> None:
        self._remembered = remembered
        self._running: set[int] = set()
        self._replies: OrderedDict[int, R] = OrderedDict()
        self._forgotten = 0

    @property
    def running(self) -> int:
        """How many calls have been admitted and not answered."""
        return len(self._running)

    def admit(self, call_id: int) -> bool:
        """True exactly once per id: run it now."""
        if call_id <= self._forgotten or call_id in self._running or call_id in self._replies:
            return False
        self._running.add(call_id)
        return True

    def answered(self, call_id: int, reply: R) -> None:
        """The admitted call has been run.  Raises KeyError on any other id."""
        self._running.remove(call_id)
        self._replies[call_id] = reply
        if len(self._replies) > self._remembered:
            forgotten, _ = self._replies.popitem(last=False)
            self._forgotten = max(self._forgotten, forgotten)

    def reply(self, call_id: int) -> R | None:
        """What was answered; None while the call runs and after it was forgotten."""
        return self._replies.get(call_id)
