"""A model on a GPU: pool, weights, recordings and staging put together."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from core.errors import ConfigError, Stage
from core.ids import BlockId
from core.kvlayout import KVLayout
from engine.cuda.recording import Recorder
from engine.cuda.transfer import PinnedCopy, pin
from engine.device.cuda import cuda_backend
from engine.device.graphs import GraphedForward, Limits, Record, RecordableBackend
from engine.device.pool import KVPool
from engine.device.runner import Runner
from engine.device.sampler import GrammarMasks
from engine.device.staging import Copy, Staged
from engine.model.build import Weights, build_decoder
from engine.model.config import ModelConfig
from engine.model.weight import on_device


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a GPU can do, as far as it is not in torch's tensors."""

    device: torch.device
    backend: Callable[[KVPool], RecordableBackend]
    record: Record
    copy: Copy
    pin: Callable[[Tensor], None]


def open_gpu(device: torch.device) -> Gpu:
    return Gpu(device, cuda_backend, Recorder(), PinnedCopy(device), pin)


@dataclass(frozen=True, slots=True)
class Steps:
    """rows: most sequences in a step.  tokens: in the longest of them."""

    rows: int
    tokens: int


def run_on(
    gpu: Gpu,
    config: ModelConfig,
    weights: Weights,
    arena: KVPool,
    steps: Steps,
    grammar: GrammarMasks | None,
) -> "OnGpu":
    """weights: all of the model, in host memory; emptied.  Raises ConfigError."""
    gpu.pin(arena.rows)
    pool = _pool(gpu.device, arena.layout, arena.blocks + 1)
    backend = gpu.backend(pool)
    moved = {name: on_device(weights.pop(name), gpu.device) for name in list(weights)}
    model = build_decoder(config, moved, backend.ops)
    staged = Staged(pool, arena, gpu.copy)
    if config.moe is not None:
        return OnGpu(pool, Runner(model, pool, backend, grammar), staged, None)
    limits = Limits(steps.rows, arena.layout.blocks_for(steps.tokens), BlockId(arena.blocks))
    forward = GraphedForward(model, pool, backend, gpu.record, limits)
    return OnGpu(pool, Runner(model, pool, backend, grammar, forward), staged, forward)


@dataclass(frozen=True, slots=True)
class OnGpu:
    """pool: on the GPU, one block larger than the arena.  forward: None where steps are not
    recorded."""

    pool: KVPool
    runner: Runner
    staged: Staged
    forward: GraphedForward | None

    def warm_up(self, progress: Callable[[str], None]) -> None:
        self.runner.warm_up()
        if self.forward is not None:
            self.forward.record(progress)


def _pool(device: torch.device, layout: KVLayout, blocks: int) -> KVPool:
    try:
        return KVPool.on(device, layout, blocks)
    except RuntimeError as error:
        raise ConfigError(
            f"kv.memory_mb: {blocks * layout.block_bytes >> 20} MiB on {device}: {error}; ask for "
            "less",
            stage=Stage.START,
            field="kv.memory_mb",
        ) from error
