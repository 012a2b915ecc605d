"""The supervisor: a detached Ray actor that keeps one living worker in every slot.

observe (actors found by name, their deaths) → `plan` → act.  Whatever it knows can be found
again by looking, so Ray may restart it at any moment; workers and streams do not notice.
"""

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

from actors.boot import WorkerBoot
from actors.ingress_feed import Members
from cluster.incarnation import Incarnation, check_room
from cluster.layout import WorkerSlot
from cluster.membership import Member, Membership
from cluster.names import parse_worker
from cluster.news import News
from cluster.plan import Action, Start, due, idle_s, plan
from cluster.status import ClusterStatus, WorkerStatus
from core.errors import Stage, TriremeError, Unavailable
from core.ids import Epoch, WorkerId
from core.messages import Fault, WorkerInfo
from core.spec import ClusterSpec, FaultSpec
from core.states import WorkerState

log = logging.getLogger(__name__)

ADOPT_S = 5.0
LOOK_S = 5.0
STOP_S = 12.0
CLOSE_S = 0.5
CRASH_EXIT = 70


@dataclass(frozen=True, slots=True)
class SupervisorBoot:
    """program: "module:class" that worker actors run."""

    spec: ClusterSpec
    slots: tuple[WorkerSlot, ...]
    program: str


class Supervisor:
    async def __init__(self, boot: SupervisorBoot) -> None:  # type: ignore[misc]  # Ray awaits it
        self._boot = boot
        self._desired = boot.slots
        self._members = Membership(version=time.time_ns())
        self._running: dict[tuple[WorkerId, Epoch], Incarnation] = {}
        self._news = News()
        self._tasks: set[asyncio.Task[None]] = set()
        self._drain_s = 0.0
        self._settled = False
        self._closing = False
        self._draining: set[Incarnation] = set()
        self._spawn(self._keep())
        self._spawn(self._publish())

    async def watch(self, version: int, timeout_s: float) -> tuple[int, Members]:
        """(version, members) as soon as the version differs, else after `timeout_s`.

        None for the members: the cluster closes, and what still runs must end now."""
        await self._news.until(lambda: self._closing or self._is_past(version), timeout_s)
        return self._members.version, None if self._closing else self._members.peers

    async def status(self) -> ClusterStatus:
        starting = [m for m in self._members if m.state is WorkerState.STARTING]
        found = [self._running.get((m.worker_id, m.epoch)) for m in starting]
        await asyncio.gather(*(i.refresh_phase() for i in found if i))
        newest = {m.worker_id: m for m in sorted(self._members, key=lambda m: m.epoch)}
        workers = tuple(self._slot_status(s, newest.get(s.worker_id)) for s in self._boot.slots)
        return ClusterStatus(self._boot.spec.name, os.getpid(), self._members.version, workers)

    async def set_faults(
        self, worker_id: WorkerId | None, rules: tuple[FaultSpec, ...]
    ) -> tuple[WorkerId, ...]:
        """Inject faults into one ready worker, or all; whom it reached."""
        chosen = [i for i in self._ready() if worker_id in (None, i.worker_id)]
        if not chosen:
            known = ", ".join(i.worker_id for i in self._ready()) or "none"
            raise Unavailable(
                f"no such worker is ready; ready: {known}",
                stage=Stage.START,
                worker=worker_id or "",
            )
        await asyncio.gather(*(i.ask("set_faults", rules) for i in chosen))
        return tuple(i.worker_id for i in chosen)

    async def audit(self) -> dict[WorkerId, str]:
        """What each ready worker finds wrong with its own books; "" is nothing."""
        chosen = self._ready()
        found = await asyncio.gather(*(i.ask("audit") for i in chosen))
        return {i.worker_id: text for i, text in zip(chosen, found, strict=True)}

    async def shutdown(self, drain_s: float) -> bool:
        """Stop every worker, what runs gets `drain_s` to finish; whether all are gone."""
        self._drain_s = drain_s
        self._desired = ()
        self._news.tell()
        return await self._news.until(lambda: not any(self._members), drain_s + STOP_S)

    async def _keep(self) -> None:
        """The loop: it wakes on every change, and when a back-off ends."""
        await self._adopt()
        while True:
            seen = self._news.count
            now = time.monotonic()
            for action in plan(self._desired, self._members, now, time.time_ns()):
                self._act(action)
            wait = idle_s(self._desired, self._members, now)
            wait = LOOK_S if wait is None else min(wait, LOOK_S)
            await self._news.until(partial(self._has_news_since, seen), wait)

    def _is_past(self, version: int) -> bool:
        return self._settled and self._members.version != version

    def _has_news_since(self, count: int) -> bool:
        return self._news.count != count

    async def _adopt(self) -> None:
        """Take over the workers that an earlier life of this supervisor started."""
        for name in await asyncio.to_thread(ray.util.list_named_actors):
            key = parse_worker(self._boot.spec.name, name)
            if key is None:
                continue
            found = await asyncio.to_thread(Incarnation.find, name, key, self._boot.spec.timeouts)
            if found is not None:
                self._members.started(*key, time.monotonic())
                self._spawn(self._follow(found))
        await self._news.until(
            lambda: all(m.state is not WorkerState.STARTING for m in self._members), ADOPT_S
        )
        self._settled = True
        self._news.tell()

    def _act(self, action: Action) -> None:
        if isinstance(action, Start):
            self._members.started(action.slot.worker_id, action.epoch, time.monotonic())
            self._spawn(self._start(action.slot, action.epoch))
        elif (found := self._running.get((action.worker_id, action.epoch))) is not None:
            self._draining.add(found)
            self._spawn(self._retire(found))

    async def _start(self, slot: WorkerSlot, epoch: Epoch) -> None:
        try:
            await check_room(slot)
        except TriremeError as error:
            self._died((slot.worker_id, epoch), error)
            return
        boot = WorkerBoot(
            slot.worker_id,
            slot.role,
            epoch,
            self._boot.spec,
            slot.threads,
            slot.blocks,
            slot.pool,
        )
        await self._follow(Incarnation.launch(boot, slot.needs, self._boot.program))

    async def _follow(self, incarnation: Incarnation) -> None:
        self._running[incarnation.key] = incarnation
        self._news.tell()  # it may be unwanted already
        cause = await incarnation.live(self._registered)
        del self._running[incarnation.key]
        self._died(incarnation.key, cause)

    def _registered(self, info: WorkerInfo) -> None:
        log.info("%s is ready at %s, epoch %d", info.worker_id, info.address, info.epoch)
        self._members.registered(info, time.monotonic())
        self._news.tell()

    def _died(self, key: tuple[WorkerId, Epoch], cause: TriremeError) -> None:
        log.warning("%s, epoch %d, ended: %s", *key, cause)
        self._members.died(*key, Fault.of(cause, key[0]), time.monotonic())
        self._news.tell()

    async def _retire(self, incarnation: Incarnation) -> None:
        """Stop in order, by force where that fails; `_follow` then sees the end."""
        try:
            if incarnation in self._ready():
                self._members.draining(*incarnation.key, time.monotonic())
                await incarnation.drain(self._drain_s)
                await self._all_drained(incarnation)
                await incarnation.ask("stop")
        except TriremeError as error:
            log.warning("%s did not stop in order: %s", incarnation.worker_id, error)
        self._draining.discard(incarnation)
        incarnation.kill()

    async def _all_drained(self, one: Incarnation) -> None:
        """Only a shutdown retires workers.  None goes before all are idle or time is up; what
        runs then is ended by the edge, which can still tell its clients."""
        self._draining.discard(one)
        self._news.tell()
        await self._news.until(lambda: not self._draining, self._drain_s)
        if not self._closing:
            self._closing = True
            self._news.tell()
        await asyncio.sleep(CLOSE_S)

    async def _publish(self) -> None:
        """Tell every ready worker who its peers are, one version after the other."""
        told = self._members.version
        while True:
            if await self._news.until(partial(self._is_past, told), LOOK_S):
                told = self._members.version
                peers = self._members.peers
                await asyncio.gather(*(self._push(i, peers) for i in self._ready()))

    async def _push(self, incarnation: Incarnation, peers: tuple[WorkerInfo, ...]) -> None:
        others = tuple(p for p in peers if p.worker_id != incarnation.worker_id)
        try:
            await incarnation.ask("set_peers", others)
        except TriremeError as error:
            log.warning("%s was not told its peers: %s", incarnation.worker_id, error)

    def _ready(self) -> list[Incarnation]:
        return [
            incarnation
            for key, incarnation in self._running.items()
            if (member := self._members.get(*key)) and member.state is WorkerState.READY
        ]

    def _slot_status(self, slot: WorkerSlot, member: Member | None) -> WorkerStatus:
        history = self._members.history(slot.worker_id)
        failures, fault = (history.failures, history.fault) if history else (0, None)
        if member is None:
            wait = max(0.0, due(history) - time.monotonic())
            phase = f"starts again in {wait:.1f} s" if history else "not started"
            return WorkerStatus(
                slot.worker_id, slot.role, WorkerState.DEAD, phase, failures=failures, fault=fault
            )
        running = self._running.get((member.worker_id, member.epoch))
        starting = member.state is WorkerState.STARTING
        return WorkerStatus(
            slot.worker_id,
            slot.role,
            member.state,
            running.phase if running and starting else str(member.state),
            member.epoch,
            running.pid if running else None,
            member.info.address if member.info else "",
            failures,
            fault,
            member.info.rank_pids if member.info else (),
            member.info.lossy if member.info else "",
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        """A task that broke takes the process with it: Ray starts a fresh supervisor, which
        adopts the workers.  Going on half alive would be a silent end."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("supervisor broke; it starts afresh", exc_info=error)
            os._exit(CRASH_EXIT)
