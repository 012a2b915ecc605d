"""Prometheus metrics of the edge.  Times are taken here, once per request, and nowhere else.

Labels come from closed sets: routes are ours, outcomes, stages and kinds are listed; nothing that
a client sends becomes a label.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from router.stages import durations
from router.streaming import TextGeneration

Sample: TypeAlias = tuple[str, Mapping[str, str], float]
Gauges: TypeAlias = Callable[[], Iterable[Sample]]
"""Name, labels and value of what others want exported; asked at every scrape."""

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)


class Outcome(StrEnum):
    """How a request ended.  The status beside it is the one that was sent."""

    FINISHED = "finished"
    CLIENT_ERROR = "client_error"
    REJECTED = "rejected"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @staticmethod
    def of_error(status: int) -> "Outcome":
        """status: what was sent; 200 is that of a stream that broke."""
        if status in (429, 503):
            return Outcome.REJECTED
        return Outcome.CLIENT_ERROR if 400 <= status < 500 else Outcome.FAILED


class EdgeMetrics:
    """Owns its registry: several edges can live in one process."""

    def __init__(self, gauges: Gauges = tuple) -> None:
        self.registry = registry = CollectorRegistry()
        self.in_flight = Gauge(
            "trireme_requests_in_flight", "requests now at the edge", registry=registry
        )
        self._requests = Counter(
            "trireme_requests", "requests", ("route", "outcome", "status"), registry=registry
        )
        self._e2e = Histogram(
            "trireme_e2e_seconds",
            "arrival to end of a finished request",
            registry=registry,
            buckets=_SECONDS,
        )
        self._ttft = Histogram(
            "trireme_ttft_seconds", "arrival to first token", registry=registry, buckets=_SECONDS
        )
        self._tpot = Histogram(
            "trireme_tpot_seconds",
            "mean time per output token after the first",
            registry=registry,
            buckets=_PER_TOKEN,
        )
        self._stage = Histogram(
            "trireme_stage_seconds",
            "time spent per stage of a generation",
            ("stage",),
            registry=registry,
            buckets=_SECONDS,
        )
        self._tokens = Counter("trireme_tokens", "tokens", ("kind",), registry=registry)
        self._degraded = Counter(
            "trireme_degraded",
            "generations that did not go the normal way",
            ("kind",),
            registry=registry,
        )
        registry.register(_Exported(gauges))

    def ended(self, route: str, outcome: Outcome, status: int, seconds: float) -> None:
        """A request is over; exactly once for each.  status 499: the client went away."""
        self._requests.labels(route, outcome, str(status)).inc()
        if outcome is Outcome.FINISHED:
            self._e2e.observe(seconds)

    def generation(self, done: TextGeneration, arrived: float) -> None:
        """One generation is over, however it ended; its request came at `arrived`."""
        accounting = done.accounting
        for kind, count in (
            ("prompt", accounting.prompt_tokens),
            ("cached", accounting.cached_tokens),
            ("completion", done.completion_tokens),
        ):
            self._tokens.labels(kind).inc(count)
        if done.first_at is not None and done.last_at is not None:
            self._ttft.observe(done.first_at - arrived)
            if done.completion_tokens > 1:
                self._tpot.observe((done.last_at - done.first_at) / (done.completion_tokens - 1))
        for stage, seconds in durations(accounting.trace, arrived).items():
            self._stage.labels(stage).observe(seconds)
        for kind in {what.partition(":")[0] for what in accounting.degraded}:
            self._degraded.labels(kind).inc()

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)


class _Exported(Collector):
    """Turns the host's samples into gauges; series vanish with what they describe."""

    def __init__(self, gauges: Gauges) -> None:
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for name, labels, value in self._gauges():
            family = families.setdefault(name, Metric(name, "of dispatcher or workers", "gauge"))
            family.add_sample(name, dict(labels), value)
        yield from families.values()
