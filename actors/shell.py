"""The Ray shell around a worker process, and the one boundary where Ray's exceptions become
`core.errors`.  The edge's shell is `actors.edge`."""

import asyncio
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol, cast

from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from actors.boot import WorkerBoot
from core.errors import DeadlineExceeded, InternalError, Stage, TriremeError, WorkerLost
from core.messages import WorkerInfo, WorkerReport
from core.spec import FaultSpec


class WorkerProgram(Protocol):
    """What a worker actor runs: `actors.worker.WorkerProcess`.  Every method may block."""

    def start(self, progress: Callable[[str], None]) -> WorkerInfo: ...
    def report(self) -> WorkerReport: ...
    def set_peers(self, peers: tuple[WorkerInfo, ...]) -> None: ...
    def set_faults(self, rules: tuple[FaultSpec, ...]) -> None: ...
    def audit(self) -> str: ...
    def drain(self) -> None: ...
    def stop(self) -> None: ...


class WorkerActor:
    """One worker process.  program: "module:class", imported here and not where it is started,
    for it brings torch along.  An asyncio actor: a slow call never keeps another waiting."""

    def __init__(self, boot: WorkerBoot, program: str) -> None:
        self._boot = boot
        self._source = program
        self._program: WorkerProgram | None = None
        self._start: asyncio.Task[WorkerInfo] | None = None
        self._phase = "importing"

    async def pid(self) -> int:
        """Answers as soon as the actor is placed."""
        return os.getpid()

    async def phase(self) -> str:
        return self._phase

    async def start(self) -> WorkerInfo:
        """Idempotent: every caller gets the one result, so a new supervisor can just ask."""
        if self._start is None:
            self._start = asyncio.create_task(asyncio.to_thread(self._bring_up))
        return await asyncio.shield(self._start)

    async def run_until_death(self) -> None:
        """Never returns: the caller's pending reference fails the moment this process ends."""
        await asyncio.Event().wait()

    async def report(self) -> WorkerReport:
        return await asyncio.to_thread(self._running().report)

    async def set_peers(self, peers: tuple[WorkerInfo, ...]) -> None:
        await asyncio.to_thread(self._running().set_peers, peers)

    async def set_faults(self, rules: tuple[FaultSpec, ...]) -> None:
        await asyncio.to_thread(self._running().set_faults, rules)

    async def audit(self) -> str:
        return await asyncio.to_thread(self._running().audit)

    async def drain(self) -> None:
        await asyncio.to_thread(self._running().drain)

    async def stop(self) -> None:
        if self._program is not None:
            await asyncio.to_thread(self._program.stop)

    def _bring_up(self) -> WorkerInfo:
        module, _, name = self._source.partition(":")
        program = cast(WorkerProgram, getattr(import_module(module), name)(self._boot))
        info = program.start(self._progress)
        self._program = program
        return info

    def _progress(self, phase: str) -> None:
        self._phase = phase

    def _running(self) -> WorkerProgram:
        if self._program is None:
            raise InternalError(
                f"not started yet ({self._phase})", stage=Stage.START, worker=self._boot.worker_id
            )
        return self._program


async def answer(ref: Any, timeout_s: float, worker: str, what: str) -> Any:
    """Await the Ray call `what`.  Raises DeadlineExceeded, WorkerLost, or the callee's error."""
    try:
        return await asyncio.wait_for(ref, timeout_s)
    except RayError as error:  # first: Ray's stand-in for a callee's TimeoutError is both
        raise translated(error, worker) from error
    except TimeoutError:
        raise DeadlineExceeded(
            f"{what} was not answered within {timeout_s:g} s", stage=Stage.START, worker=worker
        ) from None


def translated(error: RayError, worker: str) -> TriremeError:
    """The error of our own tree that a Ray exception stands for."""
    if isinstance(error, GetTimeoutError):
        return DeadlineExceeded("no answer in time", stage=Stage.START, worker=worker)
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, TriremeError):
            return cause
        return InternalError(f"{type(cause).__name__}: {cause}", stage=Stage.START, worker=worker)
    return WorkerLost(_in_short(str(error)), stage=Stage.START, worker=worker)


def _in_short(told: str) -> str:
    """Ray's account of a death without the paragraphs of general advice around it."""
    line = " ".join(told.split())
    _, _, why = line.rpartition("The actor is dead because ")
    why, _, _ = why.partition(" Some common causes")
    return f"the process is gone: {why[:300]}"
