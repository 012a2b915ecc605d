"""The edge put together: sessions to the workers, the dispatcher, and the HTTP app over both."""

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial

from starlette.applications import Starlette

from actors.fleet import SessionFleet
from actors.ingress_feed import Feed
from core.ids import Epoch, WorkerId
from core.messages import Event, WorkerInfo, WorkerReport
from core.spec import ClusterSpec, to_mapping
from engine.model import refs
from engine.model.config_file import load_config
from engine.text.load import load_tokenizer
from router.app import create_app
from router.dispatch import Dispatcher
from router.edge import EdgeContext
from router.metrics import EdgeMetrics, Sample
from router.probe import Probe
from transport.faulty import FaultInjector

_WATCH_S = 10.0
_SEED_BITS = 63
_KEEP_ALIVE_S = 10.0


class Reports:
    """The last report of every live worker, for /status and /metrics."""

    def __init__(self) -> None:
        self.last: dict[WorkerId, WorkerReport] = {}

    def on_event(self, worker_id: WorkerId, event: Event) -> None:
        if isinstance(event, WorkerReport):
            self.last[worker_id] = event

    def on_lost(self, worker_id: WorkerId, epoch: Epoch, reason: str) -> None:
        self.last.pop(worker_id, None)


class Ingress:
    """Everything of one edge process but the HTTP app; lives on its event loop."""

    def __init__(self, spec: ClusterSpec, feed: Feed) -> None:
        files = refs.resolve(spec.model.ref)
        self.spec = spec
        self.tokenizer = load_tokenizer(files)
        self.model_name = spec.model.served_name or files.name
        self._model_len = load_config(files).max_len
        self._name = f"router-{uuid.uuid4().hex[:8]}"
        self._feed = feed
        self._fleet = SessionFleet(
            self._name, spec.timeouts.connect_s, FaultInjector(spec.transport.faults)
        )
        self._reports = Reports()
        self._fleet.listen(self._reports)
        self.dispatcher = Dispatcher(self._fleet, spec, time.monotonic, self._name)
        self.probe = Probe(self.dispatcher, (0,), new_id, time.monotonic)
        self._members: tuple[WorkerInfo, ...] = ()

    async def run(self) -> None:
        """Follow membership until the cluster closes: then every request ends, with an error."""
        version = 0
        while True:
            version, members = await self._feed.watch(version, _WATCH_S)
            if members is None:
                await self.dispatcher.close()
                return
            if members != self._members:
                self._members = members
                self._fleet.update(members)
                self.probe.expire()

    async def close(self) -> None:
        await self.dispatcher.close()
        await self._fleet.close()

    def max_model_len(self) -> int:
        """Prompt plus output that every live worker can hold."""
        limits = [port.info.max_model_len for port in self._fleet.ports()]
        return min(limits, default=self.spec.model.max_len or self._model_len)

    def status(self) -> dict[str, object]:
        snapshot, counters = self.dispatcher.snapshot(), self.dispatcher.counters
        return {
            "cluster": self.spec.name,
            "model": self.model_name,
            "max_model_len": self.max_model_len(),
            "settings": to_mapping(self.spec),
            "router": {
                "name": self._name,
                "waiting": snapshot.waiting,
                "live": dict(snapshot.live),
                "in_flight_tokens": dict(snapshot.in_flight),
                "counters": asdict(counters),
            },
            "workers": [self._worker_status(info) for info in self._members],
        }

    def gauges(self) -> Iterator[Sample]:
        """What /metrics says of dispatcher and workers; series go with their worker."""
        snapshot, counters = self.dispatcher.snapshot(), self.dispatcher.counters
        yield "trireme_waiting_requests", {}, snapshot.waiting
        yield "trireme_refusals", {}, counters.refusals
        yield "trireme_cancels", {}, counters.cancels
        for stage, count in counters.retries.items():
            yield "trireme_retries", {"stage": stage}, count
        for worker, tokens in snapshot.in_flight.items():
            yield "trireme_worker_in_flight_tokens", {"worker": worker}, tokens
        for worker, report in self._reports.last.items():
            for name in _REPORTED:
                yield f"trireme_worker_{name}", {"worker": worker}, getattr(report, name)
            for counter in report.counters:
                labels = {"worker": worker, "name": counter.name}
                yield "trireme_worker_counter", labels, counter.value

    def _worker_status(self, info: WorkerInfo) -> dict[str, object]:
        report = self._reports.last.get(info.worker_id)
        return {
            **asdict(info),
            "connected": self._fleet.port(info.worker_id) is not None,
            "report": asdict(report) if report else None,
        }


_REPORTED = (
    "total_blocks",
    "free_blocks",
    "cached_blocks",
    "leased_blocks",
    "lent_blocks",
    "quarantined_blocks",
    "waiting",
    "running",
    "held",
    "queued_tokens",
    "running_tokens",
    "step_ms",
    "steps_total",
    "prompt_tokens_total",
    "cached_tokens_total",
    "generated_tokens_total",
)


def new_id() -> str:
    return uuid.uuid4().hex


def build_app(spec: ClusterSpec, feed: Feed) -> Starlette:
    """The whole edge as one ASGI app; its lifespan starts and ends everything behind it."""
    ingress = Ingress(spec, feed)
    edge = EdgeContext(
        generator=ingress.dispatcher,
        tokenizer=ingress.tokenizer,
        model_name=ingress.model_name,
        max_model_len=ingress.max_model_len,
        http=spec.http,
        ready=ingress.probe,
        status=ingress.status,
        metrics=EdgeMetrics(ingress.gauges),
        clock=time.monotonic,
        new_id=new_id,
        new_seed=partial(secrets.randbits, _SEED_BITS),
        keep_alive_s=_KEEP_ALIVE_S,
    )

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        following = asyncio.create_task(ingress.run(), name="membership")
        try:
            yield
        finally:
            following.cancel()
            await ingress.close()

    return create_app(edge, lifespan)
