"""The same engine without a cluster around it: scheduler and runner, called directly."""

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from actors.boot import WorkerBoot
from actors.loaded import load, scheduler_config
from benchmarks.measure import Run, Timing
from core.ids import AttemptKey, Epoch, RequestId, WorkerId
from core.messages import Prefill, Role, StepEvents
from core.ports import StepOutput
from core.sampling import Sampling
from core.spec import ClusterSpec
from engine.loop import Engine
from engine.policy.scheduler import Scheduler

OWNER = "benchmark"
WAIT_S = 300.0


@dataclass(slots=True)
class _Stream:
    sent: float
    stamps: list[float] = field(default_factory=list)
    tokens: int = 0
    done: bool = False


class InProcess:
    """A hybrid engine on `threads` torch threads of this process."""

    def __init__(self, spec: ClusterSpec, threads: int) -> None:
        torch.set_num_threads(threads)
        spec = replace(
            spec,
            batch=replace(spec.batch, max_queued_tokens=1 << 30),
            timeouts=replace(spec.timeouts, lease_s=1e9),
        )
        boot = WorkerBoot(WorkerId("bare"), Role.HYBRID, Epoch(1), spec, threads, spec.kv.blocks)
        self._model = model = load(boot, lambda phase: None)
        self._outputs: queue.SimpleQueue[tuple[float, StepOutput]] = queue.SimpleQueue()
        scheduler = Scheduler(scheduler_config(boot, model, address=""), model.arena.generations)
        self._engine = Engine(scheduler, model.runner, model.layout, time.monotonic, self._sink)
        self._engine.start()
        self._next = 0

    def run(self, prompts: Sequence[list[int]], streams: int, out: int) -> Run:
        """All prompts, `streams` at a time."""
        began = time.perf_counter()
        waiting = list(reversed(prompts))
        live: dict[AttemptKey, _Stream] = {}
        ended: list[_Stream] = []
        while waiting or live:
            while waiting and len(live) < streams:
                key = self._submit(waiting.pop(), out)
                live[key] = _Stream(time.perf_counter())
            self._collect(live)
            for key in [k for k, s in live.items() if s.done]:
                ended.append(live.pop(key))
        timings = tuple(
            Timing(s.stamps[0] - s.sent, s.stamps[-1] - s.sent, s.tokens) for s in ended
        )
        return Run(timings, time.perf_counter() - began)

    @property
    def kv_bytes(self) -> int:
        """Of one token."""
        return self._model.layout.kv_bytes // self._model.layout.block_size

    def stop(self) -> None:
        self._engine.stop(WAIT_S)

    def _sink(self, output: StepOutput) -> None:
        self._outputs.put((time.perf_counter(), output))

    def _submit(self, prompt: list[int], out: int) -> AttemptKey:
        self._next += 1
        key = AttemptKey(RequestId(f"b{self._next}"), 0)
        sampling = Sampling(max_tokens=out, ignore_eos=True)
        self._engine.prefill(Prefill(key, tuple(prompt), sampling), OWNER)
        return key

    def _collect(self, live: dict[AttemptKey, _Stream]) -> None:
        at, output = self._outputs.get(timeout=WAIT_S)
        for _, event in output.events:
            if isinstance(event, StepEvents):
                for token in event.events:
                    stream = live[token.key]
                    stream.stamps.append(at)
                    stream.tokens += len(token.token_ids)
                    stream.done = token.finish is not None
