"""The waiting line: requests that nobody accepted, by order of arrival.

Only its first may try the workers; newcomers stand behind.  It tries again when one of the
workers that refused it has news, when somebody else's end freed capacity, or after a hint.
"""

import asyncio
from bisect import insort
from collections.abc import Container
from dataclasses import dataclass, field

from core.ids import WorkerId


@dataclass(slots=True, order=True)
class _Place:
    ticket: int
    refused_by: Container[WorkerId] = field(compare=False)
    wake: asyncio.Event = field(compare=False, default_factory=asyncio.Event)


class Line:
    """Not thread-safe; lives on the router's event loop."""

    def __init__(self) -> None:
        self._places: list[_Place] = []

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, ticket: int) -> bool:
        return any(p.ticket == ticket for p in self._places)

    def may_try(self, ticket: int) -> bool:
        """Nobody who came earlier is waiting."""
        return not self._places or self._places[0].ticket >= ticket

    def join(self, ticket: int, refused_by: Container[WorkerId]) -> None:
        """refused_by: stays the caller's, who keeps it up to date."""
        insort(self._places, _Place(ticket, refused_by))

    async def wait(self, ticket: int, limit_s: float) -> None:
        """Until this place should look again, at most `limit_s`."""
        place = next(p for p in self._places if p.ticket == ticket)
        try:
            async with asyncio.timeout(limit_s):
                await place.wake.wait()
        except TimeoutError:
            return
        finally:
            place.wake.clear()

    def leave(self, ticket: int) -> None:
        """Idempotent.  When the first goes, the next one moves up and tries at once."""
        first = self._places[0].ticket if self._places else None
        self._places = [p for p in self._places if p.ticket != ticket]
        if ticket == first:
            self.changed()

    def changed(self, worker_id: WorkerId | None = None) -> None:
        """Capacity may have changed: of that worker, or anywhere.

        News of a worker that did not refuse the first one does not wake it: its own fruitless
        reservations there would keep it spinning.
        """
        if self._places and (worker_id is None or worker_id in self._places[0].refused_by):
            self._places[0].wake.set()
