"""What waits to be sent on one session, and the pump that sends it (or injects a fault).

    engine thread ──put──┐
    event loop ────put───┴─▶ Outbox ──next──▶ pump ──write──▶ gRPC stream

The outbox is bounded: a peer that does not read must not fill this process's memory.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from threading import Lock
from typing import NamedTuple, TypeAlias

from core.messages import Event, WorkerReport
from core.spec import FaultSpec
from transport.codec import Envelope
from transport.faulty import FaultInjector, corrupted, truncated
from transport.wire import seal


class Sealed(NamedTuple):
    """A frame that is ready to be sent.  name: class of its message."""

    name: str
    frame: bytes


Item: TypeAlias = Sealed | Event
"""Events are sealed by the pump, so that the engine thread does not pay for it."""

Write: TypeAlias = Callable[[bytes], Awaitable[None]]


class Outbox:
    """First in, first out; of waiting WorkerReports only the newest is kept and goes last.

    `put`, `put_first` and `close` from any thread; `next` from one task of the loop.  However
    many items come between two wake-ups of that task, the loop is woken once.
    """

    def __init__(self, limit: int, on_full: Callable[[], None]) -> None:
        """limit: items waiting; one more closes the outbox and calls `on_full` on the loop."""
        self._loop = asyncio.get_running_loop()
        self._limit = limit
        self._on_full = on_full
        self._lock = Lock()
        self._queue: deque[Item] = deque()
        self._report: WorkerReport | None = None
        self._closed = False
        self._woken = False
        self._ready = asyncio.Event()
        self._taken: deque[Item] = deque()

    def put(self, item: Item) -> bool:
        """Whether the item was taken on; False once closed."""
        with self._lock:
            if self._closed:
                return False
            if isinstance(item, WorkerReport):
                self._report = item
            elif len(self._queue) < self._limit:
                self._queue.append(item)
            else:
                self._closed = True
                self._on_loop(self._on_full)
                return False
            self._wake()
        return True

    def put_first(self, item: Item) -> None:
        """Ahead of everything that waits."""
        with self._lock:
            self._queue.appendleft(item)
            self._wake()

    def close(self) -> None:
        """Take nothing more on; `next` hands out what waits and then None.  Idempotent."""
        with self._lock:
            self._closed = True
            self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._on_loop(self._ready.set)

    def _on_loop(self, function: Callable[[], object]) -> None:
        # A closed loop has nobody left to send to.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    async def next(self, timeout_s: float | None = None) -> Item | None:
        """The next item; None when closed and empty.  Raises TimeoutError."""
        if not self._taken:
            async with asyncio.timeout(timeout_s):
                while not self._taken:
                    await self._ready.wait()
                    if self._take():
                        return None
        return self._taken.popleft()

    def _take(self) -> bool:
        """Move what waits to the consumer; True when there is nothing and never will be."""
        with self._lock:
            self._taken, self._queue = self._queue, self._taken
            if self._report is not None:
                self._taken.append(self._report)
                self._report = None
            over = self._closed and not self._taken
            if not over:
                self._woken = False
                self._ready.clear()
            if self._closed and not over:
                self._wake()
            return over


async def pump(outbox: Outbox, write: Write, faults: FaultInjector) -> None:
    """Send until the outbox is closed and empty.  Raises what `write` and `seal` raise."""
    while (item := await outbox.next()) is not None:
        rule = faults.decide(_name(item)) if faults.active else None
        if rule is None:
            await write(_frame(item))
        elif rule.action == "reorder":
            await _send_swapped(outbox, item, write, rule.delay_s)
        else:
            await _send_faulty(_frame(item), write, rule, faults)


def _name(item: Item) -> str:
    return item.name if isinstance(item, Sealed) else type(item).__name__


def _frame(item: Item) -> bytes:
    return item.frame if isinstance(item, Sealed) else seal(Envelope(item))


async def _send_swapped(outbox: Outbox, item: Item, write: Write, hold_s: float) -> None:
    """Let one other item pass first, if one comes within `hold_s`; that one goes unharmed."""
    with suppress(TimeoutError):
        follower = await outbox.next(hold_s)
        if follower is not None:
            await write(_frame(follower))
    await write(_frame(item))


async def _send_faulty(frame: bytes, write: Write, rule: FaultSpec, faults: FaultInjector) -> None:
    match rule.action:
        case "delay":
            await asyncio.sleep(rule.delay_s)
            await write(frame)
        case "duplicate":
            await write(frame)
            await write(frame)
        case "truncate":
            await write(truncated(frame))
        case "corrupt":
            await write(corrupted(frame))
        case "kill":
            faults.kill()
