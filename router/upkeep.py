"""Messages nobody waits for: renewals of live attempts, cancels of those given up.

A worker that no cancel reaches drops the attempt when nobody has renewed it for `lease_s`.
"""

import asyncio
import logging
from collections.abc import Iterable

from core.errors import TriremeError, WorkerLost
from core.ids import AttemptKey
from core.messages import Cancel, Renew
from core.ports import WorkerPort
from core.spec import TimeoutSpec
from router.counters import Counters
from router.table import Table

log = logging.getLogger(__name__)

_CANCEL_TRIES = 2
_RENEWALS_PER_LEASE = 4


class Upkeep:
    """Owns the background tasks; `close` ends them."""

    def __init__(self, table: Table, limits: TimeoutSpec, counters: Counters) -> None:
        self._table = table
        self._limits = limits
        self._counters = counters
        self._cancels: set[asyncio.Task[None]] = set()
        self._renewer: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Needs a running event loop.  Idempotent."""
        if self._renewer is None:
            self._renewer = asyncio.create_task(self._renew_all(), name="renew")

    def cancel(self, key: AttemptKey, ports: Iterable[WorkerPort]) -> None:
        """Tell the workers to forget `key`; returns at once."""
        for port in ports:
            self._counters.cancels += 1
            task = asyncio.create_task(self._cancel(key, port), name=f"cancel-{key}")
            self._cancels.add(task)
            task.add_done_callback(self._cancels.discard)

    async def close(self) -> None:
        """Give the cancels their time, then end everything."""
        if self._cancels:
            await asyncio.wait(self._cancels, timeout=_CANCEL_TRIES * self._limits.call_s)
        left = [*self._cancels, *([self._renewer] if self._renewer else [])]
        self._renewer = None
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _cancel(self, key: AttemptKey, port: WorkerPort) -> None:
        for _ in range(_CANCEL_TRIES):
            try:
                await port.call(Cancel(key), self._limits.call_s)
                return
            except WorkerLost:
                return  # with its session it dropped all that came by it
            except TriremeError as error:
                self._counters.cancel_errors += 1
                log.warning("cancel of %s on %s failed: %s", key, port.info.worker_id, error)

    async def _renew_all(self) -> None:
        while True:
            await asyncio.sleep(self._limits.lease_s / _RENEWALS_PER_LEASE)
            await asyncio.gather(*(self._renew(*wanted) for wanted in self._table.wanted()))

    async def _renew(self, port: WorkerPort, keys: tuple[AttemptKey, ...]) -> None:
        """What cannot be renewed is lost, and the attempt is told by the fleet."""
        try:
            async with asyncio.timeout(self._limits.call_s):
                await port.notify(Renew(keys))
        except (TriremeError, TimeoutError) as error:
            log.warning("renewal on %s failed: %s", port.info.worker_id, error)
