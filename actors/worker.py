"""A worker process without Ray: engine, session server and movers, put together and started.

sessions ──▶ WorkerService ──▶ Engine (own thread) ──sink──▶ WorkerService ──▶ sessions
                                 │        ▲  └──────sink──▶ Handoff ══▶ data links
                DataServer ──────┘ landing └──── moved ──────┘
"""

import asyncio
import logging
import os
import sys
import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from actors.boot import WorkerBoot
from actors.handoff import Handoff
from actors.loaded import LoadedModel, load, scheduler_config
from actors.peer import Local, PeerConnection
from actors.service import Identity, Serving, WorkerService
from core.errors import InternalError, Stage
from core.messages import Counter, WorkerInfo, WorkerReport
from core.ports import StepOutput
from core.spec import FaultSpec
from engine.loop import Engine
from engine.policy.config import SchedulerConfig
from engine.policy.scheduler import Scheduler
from transport.data_server import DataServer
from transport.faulty import FaultInjector
from transport.host import host_facts
from transport.link import Source
from transport.session_server import SessionServer

log = logging.getLogger(__name__)

T = TypeVar("T")

_REPORT_S = 0.2
_REPORT_SPACING_S = 0.05
_SWITCH_INTERVAL_S = 0.0005  # a busy engine thread delays I/O threads by this, not by 5 ms
_STOP_S = 10.0
_EXIT_THREAD_DIED = 70


@dataclass(frozen=True, slots=True)
class _Parts:
    """What runs in a started worker, in the order in which it is stopped."""

    server: SessionServer
    engine: Engine
    handoff: Handoff
    data: DataServer
    model: LoadedModel
    info: WorkerInfo
    fallbacks: Tally[str]


class WorkerProcess:
    """One worker.  `start` blocks until it serves; every method may come from any thread."""

    def __init__(self, boot: WorkerBoot) -> None:
        self._boot = boot
        self._faults = FaultInjector(boot.spec.transport.faults)
        self._loop = asyncio.new_event_loop()
        self._service = WorkerService()
        self._changed = asyncio.Event()
        self._running: _Parts | None = None

    def start(self, progress: Callable[[str], None]) -> WorkerInfo:
        """Load the model, listen, serve.  Raises ConfigError, ModelUnsupported."""
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        torch.set_num_threads(self._boot.threads)
        model = load(self._boot, progress)
        progress("opening sessions")
        threading.Thread(target=self._loop.run_forever, name="session", daemon=True).start()
        server = SessionServer(self._service, self._boot.host, faults=self._faults)
        address = self._await(server.start(), self._boot.spec.timeouts.connect_s)
        self._running = parts = self._assemble(model, server, address)
        parts.engine.start()
        asyncio.run_coroutine_threadsafe(self._push_reports(parts), self._loop)
        progress("ready")
        return parts.info

    def report(self) -> WorkerReport:
        return self._report(self._parts())

    def set_peers(self, peers: tuple[WorkerInfo, ...]) -> None:
        """Membership: connect ahead to who may receive from here, let go of who is gone."""
        handoff = self._parts().handoff
        others = [p for p in peers if p.worker_id != self._boot.worker_id]
        handoff.keep({(p.worker_id, p.epoch) for p in others})
        if self._boot.role.prefills and not self._boot.role.decodes:
            for peer in (p for p in others if p.role.decodes):
                handoff.warm((peer.worker_id, peer.epoch), peer.address)

    def set_faults(self, rules: tuple[FaultSpec, ...]) -> None:
        self._faults.set(rules)

    def audit(self) -> str:
        """Empty when the books balance, else what is wrong."""
        try:
            self._parts().engine.check_integrity()
        except InternalError as e:
            return e.message
        return ""

    def drain(self) -> None:
        self._parts().engine.drain()

    def stop(self) -> None:
        """End sessions, the current step and the data plane.  Idempotent."""
        if self._running is None:
            return
        parts, self._running = self._running, None
        self._await(parts.server.stop(grace_s=1.0), _STOP_S)
        parts.engine.stop(_STOP_S)
        parts.handoff.close(_STOP_S)
        parts.data.close()
        parts.model.grammars.close()
        if parts.model.gang:
            parts.model.gang.stop(_STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _assemble(self, model: LoadedModel, server: SessionServer, address: str) -> _Parts:
        spec, fallbacks = self._boot.spec, Tally[str]()
        host = host_facts()
        source = Source(model.arena, model.layout, spec.transport, spec.timeouts, self._faults)
        local = Local(self._boot.worker_id, model.compat, host, source, self._loop, fallbacks)
        handoff = Handoff(
            partial(PeerConnection, local),
            self._service.emit,
            local.worker_id,
            time.monotonic,
            model.staging.send_out,
        )
        config = scheduler_config(self._boot, model, address)
        engine = Engine(
            Scheduler(config, model.arena.generations, model.grammars),
            model.runner,
            model.layout,
            time.monotonic,
            partial(self._deliver, handoff),
        )
        handoff.bind(engine)
        model.grammars.bind(engine.wake)
        data = DataServer(
            model.staging.landing(engine.landing),
            model.arena,
            model.layout,
            spec.transport,
            spec.timeouts,
            self._boot.host,
        )
        info = _describe(self._boot, model, config)
        identity = Identity(info, model.compat, host, data.endpoints)
        self._service.bind(Serving(engine, data, identity))
        return _Parts(server, engine, handoff, data, model, info, fallbacks)

    def _deliver(self, handoff: Handoff, output: StepOutput) -> None:
        """The engine's sink, on its thread: tokens first, then blocks for the movers."""
        self._service.emit_all(output)
        for ready in output.ready:
            handoff.submit(ready)
        if output.events:
            self._loop.call_soon_threadsafe(self._changed.set)

    async def _push_reports(self, parts: _Parts) -> None:
        while self._running is not None:
            if not (parts.engine.alive and parts.handoff.healthy):
                log.critical("a thread died, see above; this worker ends and will be replaced")
                os._exit(_EXIT_THREAD_DIED)
            parts.handoff.prune()
            self._service.broadcast(self._report(parts))
            await asyncio.sleep(_REPORT_SPACING_S)
            try:
                await asyncio.wait_for(self._changed.wait(), _REPORT_S - _REPORT_SPACING_S)
            except TimeoutError:
                continue
            self._changed.clear()

    def _report(self, parts: _Parts) -> WorkerReport:
        report = parts.engine.report()
        ours = {**parts.handoff.counters, **parts.fallbacks}
        counters = tuple(Counter(name, value) for name, value in sorted(ours.items()))
        return replace(report, counters=report.counters + parts.data.counters() + counters)

    def _parts(self) -> _Parts:
        if self._running is None:
            raise InternalError("not running", stage=Stage.START, worker=self._boot.worker_id)
        return self._running

    def _await(self, work: Coroutine[Any, Any, T], limit_s: float) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(limit_s)


def _describe(boot: WorkerBoot, model: LoadedModel, config: SchedulerConfig) -> WorkerInfo:
    return WorkerInfo(
        worker_id=boot.worker_id,
        role=boot.role,
        epoch=boot.epoch,
        address=config.address,
        model=model.name,
        max_model_len=config.max_len,
        total_blocks=model.blocks,
        block_size=model.layout.block_size,
        rank_pids=model.gang.pids if model.gang else (os.getpid(),),
        weights=model.weights.storage,
        kv_variant=config.kv_variant,
        lossy=model.weights.lossy,
    )
