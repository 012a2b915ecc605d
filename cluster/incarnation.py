"""One worker actor from its placement to its death, as the supervisor holds it."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from actors.boot import WorkerBoot
from actors.shell import WorkerActor, answer, translated
from cluster.layout import WorkerSlot, shortfall
from cluster.names import worker_name
from core.errors import ConfigError, DeadlineExceeded, Stage, TriremeError, Unavailable
from core.ids import Epoch, WorkerId
from core.messages import WorkerInfo
from core.spec import TimeoutSpec

BEAT_S = 2.0
PHASE_S = 0.5
CALL_S = 5.0
DRAIN_POLL_S = 0.1


class Incarnation:
    """A handle on one actor.  Detached: it outlives the supervisor that started it."""

    def __init__(
        self, key: tuple[WorkerId, Epoch], actor: Any, limits: TimeoutSpec, needs: str
    ) -> None:
        self.worker_id, self.epoch = key
        self.actor = actor
        self.pid: int | None = None
        self.phase = "waiting for a place"
        self._limits = limits
        self._needs = needs

    @classmethod
    def launch(cls, boot: WorkerBoot, needs: Mapping[str, float], program: str) -> "Incarnation":
        """Ask Ray for the actor; a restart is a new epoch, so Ray itself never restarts it."""
        actor = (
            ray.remote(WorkerActor)
            .options(
                name=worker_name(boot.spec.name, boot.worker_id, boot.epoch),
                lifetime="detached",
                max_restarts=0,
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0.0),
            )
            .remote(boot, program)
        )
        words = ", ".join(f"{name} {amount:g}" for name, amount in needs.items())
        return cls((boot.worker_id, boot.epoch), actor, boot.spec.timeouts, words)

    @classmethod
    def find(
        cls, name: str, key: tuple[WorkerId, Epoch], limits: TimeoutSpec
    ) -> "Incarnation | None":
        """The running actor of that name; None when it died a moment ago."""
        try:
            return cls(key, ray.get_actor(name), limits, needs="what it has")
        except ValueError:
            return None

    @property
    def key(self) -> tuple[WorkerId, Epoch]:
        return self.worker_id, self.epoch

    async def ask(self, method: str, *args: object, timeout_s: float = CALL_S) -> Any:
        """Call a method of the actor.  Raises DeadlineExceeded, WorkerLost, or its error."""
        ref = getattr(self.actor, method).remote(*args)
        return await answer(ref, timeout_s, self.worker_id, method)

    async def live(self, on_ready: Callable[[WorkerInfo], None]) -> TriremeError:
        """Follow it to its end and say why it ended; no process is left then."""
        try:
            await self._placed()
            on_ready(await self.ask("start", timeout_s=self._limits.start_s))
            return await self._ended()
        except TriremeError as error:
            return error
        finally:
            self.kill()

    async def refresh_phase(self) -> None:
        """Ask how far its start is.  A worker too busy to tell keeps its last phase."""
        if self.pid is not None:
            with contextlib.suppress(TriremeError):
                self.phase = await self.ask("phase", timeout_s=PHASE_S)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new work and let what runs finish, for `timeout_s` at most."""
        await self.ask("drain")
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            report = await self.ask("report")
            if not (report.waiting or report.running or report.held):
                return
            await asyncio.sleep(DRAIN_POLL_S)

    def kill(self) -> None:
        """Idempotent."""
        ray.kill(self.actor, no_restart=True)

    async def _placed(self) -> None:
        try:
            self.pid = await self.ask("pid", timeout_s=self._limits.start_s)
        except DeadlineExceeded:
            free = await asyncio.to_thread(ray.available_resources)
            raise Unavailable(
                f"no node had room within {self._limits.start_s:g} s: it needs {self._needs}, "
                f"free is CPU {free.get('CPU', 0.0):g}; stop something, add a node or lower "
                "batch.threads",
                stage=Stage.START,
                worker=self.worker_id,
            ) from None

    async def _ended(self) -> TriremeError:
        """Dead, or silent for longer than a stream would bear, which is the same to a client."""
        death = asyncio.ensure_future(self.actor.run_until_death.remote())
        try:
            while not death.done():
                await self.ask("report", timeout_s=self._limits.token_s)
                await asyncio.wait({death}, timeout=BEAT_S)
        finally:
            death.cancel()  # or asyncio complains later that nobody asked how it ended
        cause = death.exception()
        assert isinstance(cause, RayError)
        return translated(cause, self.worker_id)


async def check_room(slot: WorkerSlot) -> None:
    """Raises ConfigError when no node could hold the slot even if it were empty."""
    nodes = await asyncio.to_thread(ray.nodes)
    lacking = shortfall(slot.needs, [node["Resources"] for node in nodes if node["Alive"]])
    if lacking:
        raise ConfigError(
            f"{slot.worker_id} can never be placed: {lacking}; "
            "lower batch.threads or add a larger node",
            stage=Stage.START,
            worker=slot.worker_id,
            field="batch.threads",
        )
