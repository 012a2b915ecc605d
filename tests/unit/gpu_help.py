"""Two workers whose pools lie apart from their arenas, as on GPUs, and the real movers between.

Copies are made when somebody waits for them and not before; what was never copied is NaN in the
arena and zeros on the device.
"""

import queue
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from actors.gpu import Gpu, OnGpu, Steps, run_on
from actors.handoff import Handoff
from core.ids import AttemptKey, Epoch, RequestId, WorkerId
from core.messages import Attach, Event, Grant, Prefill, PrefillDone, Reserve, Role, StepEvents
from core.ports import MoveReport, StepOutput, Ticket
from core.sampling import Sampling
from core.spec import TimeoutSpec, TransportSpec
from engine.device.cuda import FlexBackend
from engine.device.pool import KVPool
from engine.device.runner import kv_layout
from engine.loop import Engine
from engine.model.config import ModelConfig
from engine.model.config_file import load_config
from engine.model.refs import resolve
from engine.model.weights import load_weights
from engine.policy.config import SchedulerConfig
from engine.policy.scheduler import Scheduler
from tests.unit.cuda_help import attend, record
from transport.arena import MemfdArena
from transport.data_server import DataServer
from transport.link import Source, open_link

BLOCKS, SIZE, LIMIT_S = 24, 16, 60.0
ROLES = (Role.PREFILL, Role.DECODE)
CPU = torch.device("cpu")
OWNER = "test"


def late_copy(target: torch.Tensor, source: torch.Tensor, ids: Sequence[int]) -> Callable[[], None]:
    def wait() -> None:
        for row in ids:
            target[row] = source[row]

    return wait


def fake_gpu(pinned: list[torch.Tensor]) -> Gpu:
    def backend(pool: KVPool) -> FlexBackend:
        return FlexBackend(pool.kv.dtype, pool.kv.device, attend)

    return Gpu(CPU, backend, record, late_copy, pinned.append)


class Worker:
    """Engine, arena and data server."""

    def __init__(self, role: Role, model: str, mover: str, gpu: Gpu) -> None:
        files = resolve(model)
        config = load_config(files)
        self.layout = kv_layout(config, SIZE, "float32")
        self.transport = TransportSpec(mover=mover)  # type: ignore[arg-type]
        self.arena = MemfdArena.create(BLOCKS, self.layout.block_bytes, populate=False)
        self.arena.blocks[:] = b"\xff" * len(self.arena.blocks)
        self.in_arena = KVPool(self.layout, BLOCKS, self.arena.blocks)
        weights = load_weights(files, config, torch.float32)
        steps = Steps(rows=4, tokens=(BLOCKS - 1) * SIZE)
        self.gpu: OnGpu = run_on(gpu, config, weights, self.in_arena, steps, None)
        self.gpu.warm_up(lambda phase: None)
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.handoff: Handoff | None = None
        scheduler = Scheduler(_config(role, config), self.arena.generations)
        self.engine = Engine(scheduler, self.gpu.runner, self.layout, time.monotonic, self._sink)
        landing = self.gpu.staged.landing(self.engine.landing)
        self.data = DataServer(
            landing, self.arena, self.layout, self.transport, TimeoutSpec(), "127.0.0.1"
        )

    @property
    def rows(self) -> set[bytes]:
        """What the blocks on the device hold."""
        return {bytes(row) for row in self.gpu.pool.rows[:BLOCKS].numpy()}

    def event(self, kind: type) -> Any:
        """The next of this kind; others are passed over."""
        for _ in range(1000):
            event = self.events.get(timeout=LIMIT_S)
            if isinstance(event, kind):
                return event
        raise AssertionError(f"no {kind.__name__} among 1000 events")

    def _sink(self, output: StepOutput) -> None:
        for _, event in output.events:
            self.events.put(event)
        for ready in output.ready:
            assert self.handoff is not None
            self.handoff.submit(ready)


@dataclass
class Pair:
    prefill: Worker
    decode: Worker

    def generate(self, name: str, prompt: tuple[int, ...], count: int) -> tuple[list[int], Grant]:
        """Greedy output by way of both, and the grant of the decoding one."""
        key, sampling = AttemptKey(RequestId(name), 0), Sampling(max_tokens=count, ignore_eos=True)
        grant = self.decode.engine.reserve(Reserve(key, prompt), OWNER)
        self.prefill.engine.prefill(Prefill(key, prompt, sampling, grant=grant), OWNER)
        done: PrefillDone = self.prefill.event(PrefillDone)
        (token,) = done.first.token_ids
        attach = Attach(key, grant.lease_id, grant.epoch, token, 1, sampling)
        self.decode.engine.attach(attach, OWNER)
        tokens = [token]
        while len(tokens) < count:
            tokens += [t for e in self.decode.event(StepEvents).events for t in e.token_ids]
        return tokens, grant


@contextmanager
def pair(model: str, mover: str, gpus: tuple[Gpu, Gpu]) -> Iterator[Pair]:
    """model: as `ModelSpec.ref`.  gpus: of the prefill worker and of the decode worker."""
    with ExitStack() as stack:
        made = Pair(*(Worker(r, model, mover, g) for r, g in zip(ROLES, gpus, strict=True)))
        source, target = made.prefill, made.decode
        key = secrets.token_bytes(32)
        target.data.admit("prefill", key)
        link = open_link(
            target.data.endpoints[0],
            key,
            Source(source.arena, source.layout, source.transport, TimeoutSpec()),
            "decode",
        )
        source.handoff = Handoff(
            lambda peer, address: _Peer(link),
            lambda owner, event: source.events.put(event),
            WorkerId("prefill"),
            time.monotonic,
            source.gpu.staged.send_out,
        )
        source.handoff.bind(source.engine)
        for worker in (source, target):
            worker.engine.start()
            stack.callback(worker.data.close)
            stack.callback(worker.engine.stop, LIMIT_S)
        stack.callback(link.close)
        stack.callback(source.handoff.close, LIMIT_S)
        yield made
        for worker in (source, target):
            worker.engine.check_integrity()


class _Peer:
    def __init__(self, link: Any) -> None:
        self._link = link

    def push(self, ticket: Ticket) -> MoveReport:
        report: MoveReport = self._link.push(ticket, LIMIT_S)
        return report

    def abort(self, notice: object) -> None:
        raise AssertionError(f"a push failed: {notice}")

    def close(self) -> None:
        """The link is the test's."""


def _config(role: Role, model: ModelConfig) -> SchedulerConfig:
    return SchedulerConfig(
        role=role, worker_id=WorkerId(role), epoch=Epoch(1), address="here", total_blocks=BLOCKS,
        block_size=SIZE, chunk_tokens=20, policy="sarathi", layers=model.layers, max_running=4,
        max_queued_tokens=1000, max_model_len=model.max_len, vocab_size=model.vocab_size,
        eos_ids=frozenset(), lease_s=60.0, model_digest="m", kv_variant="v",
    )  # fmt: skip
