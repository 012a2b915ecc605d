"""The router's live sessions, one per worker incarnation that membership lists."""

import asyncio
import logging
from collections.abc import Iterator

from core.errors import TriremeError
from core.ids import Epoch, WorkerId
from core.messages import WIRE_VERSION, Event, Hello, WorkerInfo
from core.ports import FleetListener, WorkerPort
from transport.faulty import FaultInjector
from transport.session_client import ClientSession

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0


class SessionFleet:
    """`core.ports.Fleet`.  Lives on one event loop; `update` is called on that loop."""

    def __init__(self, name: str, connect_s: float, faults: FaultInjector | None = None) -> None:
        self._name = name
        self._connect_s = connect_s
        self._faults = faults
        self._ports: dict[WorkerId, ClientSession] = {}
        self._keepers: dict[tuple[WorkerId, Epoch], asyncio.Task[None]] = {}
        self._listeners: list[FleetListener] = []

    def ports(self) -> Iterator[WorkerPort]:
        return iter(tuple(self._ports.values()))

    def port(self, worker_id: WorkerId) -> WorkerPort | None:
        return self._ports.get(worker_id)

    def listen(self, listener: FleetListener) -> None:
        self._listeners.append(listener)

    def update(self, workers: tuple[WorkerInfo, ...]) -> None:
        """Membership changed: open sessions to new incarnations, let go of vanished ones."""
        wanted = {(w.worker_id, w.epoch): w for w in workers}
        for key in self._keepers.keys() - wanted.keys():
            self._keepers.pop(key).cancel()
        for key in wanted.keys() - self._keepers.keys():
            self._keepers[key] = asyncio.create_task(self._keep(wanted[key]), name=f"keep-{key}")

    async def close(self) -> None:
        keepers = list(self._keepers.values())
        self._keepers.clear()
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)

    async def _keep(self, info: WorkerInfo) -> None:
        """Hold a session to one incarnation; reconnect while membership still lists it."""
        backoff = _FIRST_BACKOFF_S
        while True:
            lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            try:
                session = await self._open(info, lost)
            except TriremeError as e:
                log.info("no session with %s yet: %s", info.worker_id, e)
                await asyncio.sleep(backoff)
                backoff = min(backoff * 2, _MAX_BACKOFF_S)
                continue
            backoff = _FIRST_BACKOFF_S
            await self._hold(info, session, lost)

    async def _open(self, info: WorkerInfo, lost: asyncio.Future[str]) -> ClientSession:
        def on_event(event: Event) -> None:
            for listener in self._listeners:
                listener.on_event(info.worker_id, event)

        def on_lost(reason: str) -> None:
            if not lost.done():
                lost.set_result(reason)

        hello = Hello(WIRE_VERSION, self._name, info.epoch)
        return await ClientSession.connect(
            info.address, hello, on_event, on_lost, self._connect_s, self._faults
        )

    async def _hold(
        self, info: WorkerInfo, session: ClientSession, lost: asyncio.Future[str]
    ) -> None:
        self._ports[info.worker_id] = session
        reason = "it left the cluster"
        try:
            reason = await lost
        finally:
            if self._ports.get(info.worker_id) is session:
                del self._ports[info.worker_id]
            log.warning("session with %s ended: %s", info.worker_id, reason)
            for listener in self._listeners:
                listener.on_lost(info.worker_id, info.epoch, reason)
            await session.close()
