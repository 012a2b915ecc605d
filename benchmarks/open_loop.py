"""One engine under requests that arrive when they arrive, answered or not.

Scheduler and runner are stepped by hand on a clock that a step moves on by what it took and that
jumps to the next arrival when there is nothing to do: no time is spent on waiting.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import quantiles

from actors.loaded import LoadedModel
from benchmarks.arrivals import Arrival
from core.ids import AttemptKey, RequestId
from core.messages import Prefill, StepEvents
from core.ports import StepOutput
from core.sampling import Sampling
from engine.policy.config import SchedulerConfig
from engine.policy.scheduler import Scheduler

OWNER = "benchmark"


@dataclass(slots=True)
class Figures:
    """Seconds, over all requests of one or several runs."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    wall: float = 0.0

    def add(self, sent: float, stamps: Sequence[float]) -> None:
        """stamps: when each token came."""
        self.ttft.append(stamps[0] - sent)
        self.tokens += len(stamps)
        if len(stamps) > 1:
            self.tpot.append((stamps[-1] - stamps[0]) / (len(stamps) - 1))
            self.gaps.append(max(b - a for a, b in pairwise(stamps)))

    def row(self) -> tuple[float, ...]:
        """TTFT p50 and p99, TPOT p50 and p99, the longest gap between two tokens of a request
        (all ms), tokens/s."""
        times = (*_median_and_99(self.ttft), *_median_and_99(self.tpot), max(self.gaps))
        return (*(1e3 * t for t in times), self.tokens / self.wall)


class OpenLoop:
    """clock: seconds, of which a step takes so many."""

    def __init__(self, model: LoadedModel, clock: Callable[[], float]) -> None:
        self._model = model
        self._clock = clock

    def run(self, rules: SchedulerConfig, arrivals: Sequence[Arrival], into: Figures) -> None:
        """From an empty cache to the last token."""
        scheduler = Scheduler(rules, self._model.arena.generations)
        coming = deque(enumerate(arrivals))
        stamps: dict[AttemptKey, list[float]] = {}
        now, unfinished = 0.0, len(arrivals)
        while unfinished:
            while coming and coming[0][1].at <= now:
                stamps[_submit(scheduler, *coming.popleft(), now)] = []
            began = self._clock()
            plan = scheduler.plan(now)
            if not plan.works:
                now = coming[0][1].at
                continue
            sampled = self._model.runner.run(plan)
            output = scheduler.commit(plan, sampled, now)
            now += self._clock() - began
            unfinished -= _note(output, now, stamps)
        into.wall += now
        for arrival, of_request in zip(arrivals, stamps.values(), strict=True):
            into.add(arrival.at, of_request)


def _submit(scheduler: Scheduler, number: int, arrival: Arrival, now: float) -> AttemptKey:
    key = AttemptKey(RequestId(f"r{number}"), 0)
    sampling = Sampling(max_tokens=arrival.out, ignore_eos=True)
    scheduler.prefill(Prefill(key, arrival.prompt, sampling), OWNER, now)
    return key


def _note(output: StepOutput, now: float, stamps: dict[AttemptKey, list[float]]) -> int:
    """How many requests ended."""
    tokens = [t for _, e in output.events if isinstance(e, StepEvents) for t in e.events]
    for token in tokens:
        stamps[token.key].append(now)
    return sum(token.finish is not None for token in tokens)


def _median_and_99(values: Sequence[float]) -> tuple[float, float]:
    cuts = quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[98]
