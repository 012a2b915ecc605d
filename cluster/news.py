"""One signal for everything that waits on the supervisor's state."""

import asyncio
from collections.abc import Callable


class News:
    """Wakes every waiter at each change; all on one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.count = 0

    def tell(self) -> None:
        self.count += 1
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `ready()`, looked at on every change; whether it is so at the end."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while not ready() and (left := end - loop.time()) > 0:
            try:
                await asyncio.wait_for(self._event.wait(), left)
            except TimeoutError:
                break
        return ready()
