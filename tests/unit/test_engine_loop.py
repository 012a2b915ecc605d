"""The engine's thread: calls during a step, steps that fail, a device that keeps failing."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from core.ids import AttemptKey, Epoch, RequestId, WorkerId
from core.kvlayout import KVLayout
from core.messages import AttemptFailed, FinishReason, Prefill, Role, StepEvents
from core.ports import StepOutput
from core.sampling import Sampling
from engine.loop import Engine
from engine.policy.config import SchedulerConfig
from engine.policy.plan import Plan, Sampled
from engine.policy.scheduler import Scheduler

LIMIT_S = 10.0
CONFIG = SchedulerConfig(
    role=Role.HYBRID,
    worker_id=WorkerId("w"),
    epoch=Epoch(1),
    address="a",
    total_blocks=32,
    block_size=4,
    chunk_tokens=64,
    policy="sarathi",
    layers=1,
    max_running=8,
    max_queued_tokens=1000,
    max_model_len=100,
    vocab_size=50,
    eos_ids=frozenset(),
    lease_s=60.0,
    model_digest="m",
    kv_variant="v",
)


class Runner:
    """Samples token 7.  `gate` holds steps back; `faults` fail as many of the next steps."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.faults = 0

    def run(self, plan: Plan) -> list[Sampled | None]:
        self.entered.set()
        assert self.gate.wait(LIMIT_S)
        if self.faults:
            self.faults -= 1
            raise RuntimeError("device fault")
        return [Sampled(7) if work.sample else None for work in plan.works]


class Bench:
    def __init__(self) -> None:
        self.runner = Runner()
        self.outputs: list[StepOutput] = []
        self.changed = threading.Condition()
        clock = iter(i / 1000 for i in range(10**9))
        self.engine = Engine(
            Scheduler(CONFIG), self.runner, KVLayout(1, 1, 4, 1, "float32"),
            lambda: next(clock), self.sink,
        )  # fmt: skip

    def sink(self, output: StepOutput) -> None:
        with self.changed:
            self.outputs.append(output)
            self.changed.notify_all()

    def events(self, kind: type) -> list:
        return [e for o in self.outputs for _, e in o.events if isinstance(e, kind)]

    def until(self, check) -> None:
        with self.changed:
            assert self.changed.wait_for(check, LIMIT_S)

    def submit(self, name: str, max_tokens: int = 3) -> AttemptKey:
        key = AttemptKey(RequestId(name), 0)
        self.engine.prefill(Prefill(key, (1, 2, 3), Sampling(max_tokens=max_tokens)), "me")
        return key

    def finished(self) -> list[AttemptKey]:
        return [t.key for s in self.events(StepEvents) for t in s.events if t.finish]


@contextmanager
def bench() -> Iterator[Bench]:
    made = Bench()
    made.engine.start()
    try:
        yield made
    finally:
        made.runner.gate.set()
        made.engine.stop(LIMIT_S)


def test_a_request_runs_to_its_end_and_leaves_nothing() -> None:
    with bench() as b:
        key = b.submit("a")
        b.until(lambda: key in b.finished())
        tokens = [t for s in b.events(StepEvents) for t in s.events]
        assert [t.index for t in tokens] == [0, 1, 2]
        assert tokens[-1].finish is FinishReason.LENGTH
        assert b.engine.report().free_blocks == CONFIG.total_blocks
        b.engine.check_integrity()


def test_calls_are_answered_while_a_step_runs() -> None:
    with bench() as b:
        b.runner.gate.clear()
        key = b.submit("a", 50)
        assert b.runner.entered.wait(LIMIT_S)
        other = b.submit("b")
        assert b.engine.holds(other)
        assert b.engine.report().waiting == 1
        assert b.engine.cancel(key)
        assert not b.engine.holds(key)
        b.runner.gate.set()
        b.until(lambda: other in b.finished())
        assert key not in {t.key for s in b.events(StepEvents) for t in s.events}
        assert b.engine.report().free_blocks == CONFIG.total_blocks


def test_a_failed_step_fails_its_requests_and_nothing_else() -> None:
    with bench() as b:
        b.runner.faults = 1
        doomed = b.submit("a")
        b.until(lambda: b.events(AttemptFailed))
        (failed,) = b.events(AttemptFailed)
        assert failed.key == doomed
        assert "device fault" in failed.fault.message
        fine = b.submit("b")
        b.until(lambda: fine in b.finished())
        assert b.engine.alive
        assert b.engine.report().free_blocks == CONFIG.total_blocks


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_device_that_keeps_failing_ends_the_engine() -> None:
    with bench() as b:
        b.runner.faults = 100
        for name in "abc":
            b.submit(name)
            b.until(lambda n=name: len(b.events(AttemptFailed)) > "abc".index(n) or n == "c")
        b.engine._thread.join(LIMIT_S)
        assert not b.engine.alive


def test_an_attempt_nobody_renews_is_dropped_and_told() -> None:
    with bench() as b:
        b.runner.gate.clear()
        key = b.submit("a", 50)
        assert b.runner.entered.wait(LIMIT_S)
        b.engine._clock = lambda: 1000.0
        b.runner.gate.set()
        b.until(lambda: b.events(AttemptFailed))
        assert b.events(AttemptFailed)[0].key == key
        assert b.engine.report().free_blocks == CONFIG.total_blocks
