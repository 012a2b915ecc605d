"""A model in memory with its KV pool: everything of a worker that takes seconds to make."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeAlias

import torch

from actors.boot import RankBoot, WorkerBoot
from actors.control import LOADED, Control
from actors.gang import Gang
from actors.gpu import Steps, open_gpu, run_on
from core.errors import ConfigError, Stage
from core.kvlayout import Compatibility, KVLayout
from core.messages import WIRE_VERSION
from core.spec import ClusterSpec
from engine.device.choice import best_backend, choose_device
from engine.device.pool import DTYPES, KVPool
from engine.device.runner import Runner, auto_dtype, kv_layout
from engine.device.staging import InPlace, Staging
from engine.grammar.book import GrammarBook
from engine.grammar.isolated import IsolatedCompiler
from engine.grammar.shelf import GrammarShelf
from engine.grammar.vocabulary import read_vocabulary
from engine.loop import StepRunner
from engine.model import refs
from engine.model.build import build_decoder
from engine.model.config import ModelConfig
from engine.model.config_file import load_config
from engine.model.digest import model_digest
from engine.model.formats import WeightFormat, choose
from engine.model.refs import ModelFiles
from engine.model.weights import load_weights
from engine.parallel.collectives import Collectives, connect, join_store
from engine.parallel.gang import GangRunner, follow
from engine.parallel.split import check_size
from engine.parallel.spread import build_rank
from engine.policy.config import SchedulerConfig
from transport.arena import MemfdArena, RankArena

_MIN_BLOCKS = 2
_GRAMMAR_LANES = 2
Meet: TypeAlias = Callable[[torch.device], Collectives]


@dataclass(frozen=True, slots=True)
class Source:
    """A model as its files describe it, and how its KV and its weights lie in memory."""

    files: ModelFiles
    config: ModelConfig
    layout: KVLayout
    weights: WeightFormat
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.layout.dtype]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The arena is the pool's memory, or that of its staging; it must outlive the runner.
    gang: None for one rank.

    grammars: closed when the worker stops.
    """

    name: str
    config: ModelConfig
    layout: KVLayout
    blocks: int
    arena: MemfdArena
    runner: StepRunner
    staging: Staging
    grammars: GrammarShelf
    gang: Gang | None
    weights: WeightFormat
    compat: Compatibility


def load(boot: WorkerBoot, progress: Callable[[str], None]) -> LoadedModel:
    """Blocks for seconds.  Raises ConfigError, ModelUnsupported, WorkerLost."""
    source = _find(boot.spec, boot.pool, progress)
    size = boot.pool_spec.tensor_parallel
    check_size(source.config, size, f"pools[{boot.pool}].tensor_parallel")
    if size > 1 and source.device.type != "cpu":
        raise ConfigError(
            f"pools[{boot.pool}].tensor_parallel: {size} ranks run on CPUs only; set model.device "
            "to cpu, or tensor_parallel to 1",
            stage=Stage.START,
            worker=boot.worker_id,
            field=f"pools[{boot.pool}].tensor_parallel",
        )
    blocks = _blocks(boot, source.layout)
    progress(f"KV pool: {blocks} blocks, {blocks * source.layout.block_bytes >> 20} MiB")
    gang = Gang(boot, blocks, source.layout.block_bytes) if size > 1 else None
    arena = MemfdArena.create(blocks, source.layout.block_bytes, share=gang.spawn if gang else None)
    weights = source.weights
    lossy = f" (lossy: {weights.lossy})" if weights.lossy else ""
    progress(f"loading {source.files.name} as {weights.storage}{lossy}")
    pool = KVPool(source.layout, blocks, arena.blocks)
    grammars = _grammars(source)
    book = GrammarBook(grammars, source.config.vocab_size, source.config.eos_ids)
    own, staging = _started(boot, source, pool, gang, book, progress)
    if gang:
        gang.watch()
    variant = f"kv={source.layout.dtype}/weights={weights.values}"
    return LoadedModel(
        name=boot.spec.model.served_name or source.files.name,
        config=source.config,
        layout=source.layout,
        blocks=blocks,
        arena=arena,
        runner=GangRunner(own, gang.send) if gang else own,
        staging=staging,
        grammars=grammars,
        gang=gang,
        weights=weights,
        compat=Compatibility(WIRE_VERSION, model_digest(source.files), variant, source.layout),
    )


def follow_leader(boot: RankBoot, arena: RankArena, control: Control) -> None:
    """All that a rank other than the leader does, until the leader is gone.

    Raises what `load` raises.
    """
    torch.set_num_threads(boot.threads)
    source = _find(boot.spec, boot.pool, lambda phase: None)

    def meet(device: torch.device) -> Collectives:
        control.mark(LOADED)
        return connect(boot.rank, boot.size, join_store(boot.port), device)

    own = _runner(source, KVPool(source.layout, boot.blocks, arena.blocks), meet)
    own.warm_up()
    follow(own, control.receive)


def _find(spec: ClusterSpec, pool: int, progress: Callable[[str], None]) -> Source:
    files = refs.resolve(spec.model.ref, progress)
    config = load_config(files)
    device = choose_device(spec.model.device)
    dtype = auto_dtype(device) if spec.model.dtype == "auto" else spec.model.dtype
    layout = kv_layout(config, spec.kv.block_size, dtype)
    return Source(files, config, layout, choose(spec, pool, dtype, files), device)


def _blocks(boot: WorkerBoot, layout: KVLayout) -> int:
    blocks = boot.blocks or (boot.spec.kv.memory_mb << 20) // layout.block_bytes
    if blocks < _MIN_BLOCKS:
        raise ConfigError(
            f"kv: {blocks} blocks of {layout.block_bytes} bytes hold no sequence; "
            "raise kv.memory_mb or kv.blocks",
            stage=Stage.START,
            worker=boot.worker_id,
            field="kv.memory_mb",
        )
    return blocks


def _grammars(source: Source) -> GrammarShelf:
    vocabulary = cache(partial(read_vocabulary, source.files))
    return GrammarShelf([IsolatedCompiler(vocabulary) for _ in range(_GRAMMAR_LANES)])


def _started(
    boot: WorkerBoot,
    source: Source,
    pool: KVPool,
    gang: Gang | None,
    book: GrammarBook,
    progress: Callable[[str], None],
) -> tuple[Runner, Staging]:
    """A warm runner on the source's device, and what stands between it and the arena.

    pool: the arena's.
    """
    if source.device.type == "cpu":
        own = _runner(source, pool, gang.meet if gang else None, book)
        progress("warming up")
        own.warm_up()
        return own, InPlace()
    weights = load_weights(source.files, source.config, source.dtype, source.weights.storage)
    steps = Steps(boot.spec.batch.max_running, _longest(boot, source.config))
    gpu = run_on(open_gpu(source.device), source.config, weights, pool, steps, book)
    progress("warming up")
    gpu.warm_up(progress)
    return gpu.runner, gpu.staged


def _longest(boot: WorkerBoot, config: ModelConfig) -> int:
    """Most tokens of prompt and output."""
    limit = boot.spec.model.max_len
    return min(limit, config.max_len) if limit else config.max_len


def _runner(
    source: Source,
    pool: KVPool,
    meet: Meet | None,
    book: GrammarBook | None = None,
) -> Runner:
    """meet: for one rank of several, waits for the others; called with the weights loaded."""
    weights = load_weights(source.files, source.config, source.dtype, source.weights.storage)
    backend = best_backend(source.dtype)
    if meet is None:
        return Runner(build_decoder(source.config, weights, backend.ops), pool, backend, book)
    group = meet(backend.device)
    model = build_rank(source.config, weights, backend.ops, group)
    return Runner(model, pool.of_rank(group.rank, group.size), backend, book)


def scheduler_config(boot: WorkerBoot, model: LoadedModel, address: str) -> SchedulerConfig:
    """address: what grants say this worker is reached at."""
    batch = boot.spec.batch
    return SchedulerConfig(
        role=boot.role,
        worker_id=boot.worker_id,
        epoch=boot.epoch,
        address=address,
        total_blocks=model.blocks,
        block_size=model.layout.block_size,
        chunk_tokens=batch.chunk_tokens,
        policy=batch.policy,
        layers=model.config.layers,
        max_running=batch.max_running,
        max_queued_tokens=batch.max_queued_tokens,
        max_model_len=_longest(boot, model.config),
        vocab_size=model.config.vocab_size,
        eos_ids=frozenset(model.config.eos_ids),
        lease_s=boot.spec.timeouts.lease_s,
        model_digest=model.compat.model_digest,
        kv_variant=model.compat.kv_variant,
    )
