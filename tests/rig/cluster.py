"""A whole cluster for tests: worker processes, and fleet and dispatcher in this process."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

from actors.fleet import SessionFleet
from core.ids import RequestId
from core.messages import Role
from core.sampling import Sampling
from core.spec import ClusterSpec
from router.dispatch import Dispatcher
from router.request import Accounting, Generate
from tests.rig.workers import Worker
from transport.faulty import FaultInjector

SETTLE_S = 30.0


class Cluster:
    """Workers outlive event loops; `Router` is per loop."""

    def __init__(self, spec: ClusterSpec, threads: int = 1) -> None:
        self.spec = spec
        self.workers: dict[str, Worker] = {}
        for place, pool in enumerate(spec.pools):
            for index in range(pool.replicas):
                name = f"{pool.role}-{index}"
                self.workers[name] = Worker(name, pool.role, spec, spec.kv.blocks, threads, place)
        for worker in self.workers.values():
            worker.ready()
        self.introduce()

    def introduce(self) -> None:
        """What the supervisor does when membership changes."""
        infos = [w.info for w in self.workers.values()]
        for worker in self.workers.values():
            worker.set_peers(infos)

    def restart(self, name: str) -> None:
        """Replace a dead worker by a new incarnation."""
        self.workers[name] = self.workers[name].restarted()
        self.workers[name].ready()
        self.introduce()

    def of(self, role: Role) -> list[Worker]:
        return [w for w in self.workers.values() if w.role is role]

    def settle(self) -> None:
        """Wait until every worker is idle; then everything must be free and accounted for."""
        end = time.monotonic() + SETTLE_S
        for worker in self.workers.values():
            while (held := leftovers(worker.report())) and time.monotonic() < end:
                time.sleep(0.1)
            assert not held, f"{worker.worker_id} still holds {held}"
            assert worker.audit() == ""

    def stop(self) -> None:
        for worker in self.workers.values():
            worker.stop()


def leftovers(report: dict[str, object]) -> dict[str, object]:
    """What an idle worker must not have."""
    names = (
        "waiting",
        "running",
        "held",
        "leased_blocks",
        "lent_blocks",
        "quarantined_blocks",
        "queued_tokens",
        "running_tokens",
    )
    left = {name: report[name] for name in names if report[name]}
    if report["free_blocks"] != report["total_blocks"]:
        left["missing_blocks"] = int(report["total_blocks"]) - int(report["free_blocks"])
    return left


class Router:
    """Fleet and dispatcher on the running loop.  `async with Router(cluster) as router:`"""

    def __init__(self, cluster: Cluster, name: str = "test-router") -> None:
        self.cluster = cluster
        self.faults = FaultInjector()
        self.fleet = SessionFleet(name, cluster.spec.timeouts.connect_s, self.faults)
        self.dispatcher = Dispatcher(self.fleet, cluster.spec, time.monotonic, name)
        self._ids = iter(range(1 << 40))

    async def __aenter__(self) -> "Router":
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.dispatcher.close()
        await self.fleet.close()

    async def connect(self) -> None:
        """Tell the fleet who is there, and wait until it has a session with each that lives."""
        workers = self.cluster.workers.values()
        self.fleet.update(tuple(w.info for w in workers))
        async with asyncio.timeout(SETTLE_S):
            while {p.info.epoch for p in self.fleet.ports()} < {
                w.epoch for w in workers if w.alive
            }:
                await asyncio.sleep(0.02)

    def request(self, tokens: Sequence[int], sampling: Sampling, salt: str = "") -> Generate:
        return Generate(RequestId(f"r{next(self._ids)}"), tuple(tokens), sampling, salt)

    async def tokens(
        self, tokens: Sequence[int], sampling: Sampling, salt: str = ""
    ) -> tuple[list[int], Accounting]:
        """Generate to the end.  Raises what the generation raises."""
        generation = await self.dispatcher.generate(self.request(tokens, sampling, salt))
        out: list[int] = []
        async for batch in generation:
            out += (token.id for token in batch)
        return out, generation.accounting

    async def cancelled(self, request: Generate, after_s: float) -> None:
        """Start it and give it up after a while, whatever it is doing then."""
        generation = await self.dispatcher.generate(request)

        async def consume() -> None:
            async for _ in generation:
                pass

        consumer = asyncio.create_task(consume())
        await asyncio.wait({consumer}, timeout=after_s)
        consumer.cancel()
        with suppress(asyncio.CancelledError):
            await consumer
        await generation.aclose()
