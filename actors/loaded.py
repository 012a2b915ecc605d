"""A model in memory with its KV pool: everything of a worker that takes seconds to make."""

from collections.abc import Callable
from dataclasses import dataclass

from actors.boot import WorkerBoot
from core.errors import ConfigError, Stage
from core.kvlayout import Compatibility, KVLayout
from core.messages import WIRE_VERSION
from engine.device.pool import DTYPES
from engine.device.runner import Runner, auto_dtype, build_runner, kv_layout
from engine.model import refs
from engine.model.config import ModelConfig, load_config
from engine.model.weights import load_weights, model_digest
from engine.policy.config import SchedulerConfig
from transport.arena import MemfdArena

_MIN_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The arena is the pool's memory; it must outlive the runner."""

    name: str
    config: ModelConfig
    layout: KVLayout
    blocks: int
    arena: MemfdArena
    runner: Runner
    compat: Compatibility


def load(boot: WorkerBoot, progress: Callable[[str], None]) -> LoadedModel:
    """Blocks for seconds.  Raises ConfigError, ModelUnsupported."""
    spec = boot.spec
    files = refs.resolve(spec.model.ref, progress)
    config = load_config(files)
    dtype = auto_dtype() if spec.model.dtype == "auto" else spec.model.dtype
    layout = kv_layout(config, spec.kv.block_size, dtype)
    blocks = boot.blocks or (spec.kv.memory_mb << 20) // layout.block_bytes
    if blocks < _MIN_BLOCKS:
        raise ConfigError(
            f"kv: {blocks} blocks of {layout.block_bytes} bytes hold no sequence; "
            "raise kv.memory_mb or kv.blocks",
            stage=Stage.START,
            worker=boot.worker_id,
            field="kv.memory_mb",
        )
    progress(f"KV pool: {blocks} blocks, {blocks * layout.block_bytes >> 20} MiB")
    arena = MemfdArena.create(blocks, layout.block_bytes)
    progress(f"loading {files.name} as {dtype}")
    weights = load_weights(files, config, DTYPES[dtype])
    runner = build_runner(config, weights, layout, blocks, arena.blocks)
    progress("warming up")
    runner.warm_up()
    variant = f"kv={dtype}/weights={dtype}"
    compat = Compatibility(WIRE_VERSION, model_digest(files), variant, layout)
    name = spec.model.served_name or files.name
    return LoadedModel(name, config, layout, blocks, arena, runner, compat)


def scheduler_config(boot: WorkerBoot, model: LoadedModel, address: str) -> SchedulerConfig:
    """address: what grants say this worker is reached at."""
    batch, limit, longest = boot.spec.batch, boot.spec.model.max_len, model.config.max_len
    return SchedulerConfig(
        role=boot.role,
        worker_id=boot.worker_id,
        epoch=boot.epoch,
        address=address,
        total_blocks=model.blocks,
        block_size=model.layout.block_size,
        chunk_tokens=batch.chunk_tokens,
        max_running=batch.max_running,
        max_queued_tokens=batch.max_queued_tokens,
        max_model_len=min(limit, longest) if limit else longest,
        vocab_size=model.config.vocab_size,
        eos_ids=frozenset(model.config.eos_ids),
        lease_s=boot.spec.timeouts.lease_s,
        model_digest=model.compat.model_digest,
        kv_variant=model.compat.kv_variant,
    )
