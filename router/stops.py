"""Stop strings over visible text, independent of how the text arrives.  Pure.

Rule: the output ends where the leftmost stop string begins; the stop string is not part of it.
Where one stop string could still begin further left than one that is complete ("abcd" and "bc"
after "abc"), the decision waits until it is certain.
"""

from collections.abc import Sequence


class StopMatcher:
    """Releases text as soon as no stop string can begin in it.

    concat of all `push` and the `finish` == the whole text cut at its leftmost stop string.
    After `hit` nothing more is released.  Holds back less than the longest stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.hit = False

    def push(self, text: str) -> str:
        """What of the text so far can be shown now."""
        if self.hit:
            return ""
        self._held += text
        complete, open_at = self._complete(), self._open()
        self.hit = complete is not None and complete <= open_at
        return self._release(complete if self.hit else open_at)

    def finish(self) -> str:
        """The text has ended: the rest of it, up to a stop string if there is one."""
        if self.hit:
            return ""
        complete = self._complete()
        self.hit = complete is not None
        return self._release(complete)

    def _release(self, end: int | None) -> str:
        shown = self._held[:end]
        self._held = self._held[len(shown) :]
        return shown

    def _complete(self) -> int | None:
        """Where the leftmost stop string that is all there begins."""
        found = (self._held.find(stop) for stop in self._stops)
        return min((at for at in found if at >= 0), default=None)

    def _open(self) -> int:
        """Where the longest suffix begins that more text could make a stop string."""
        end = len(self._held)
        for at in range(max(0, end - self._longest + 1), end):
            suffix = self._held[at:]
            if any(stop.startswith(suffix) and stop != suffix for stop in self._stops):
                return at
        return end
