"""From settings to a warm worker on a GPU, CUDA's own calls replaced: there is no GPU here."""

import time
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch

from actors import loaded
from actors.boot import WorkerBoot
from core.errors import ConfigError
from core.ids import AttemptKey, Epoch, RequestId, WorkerId
from core.kvlayout import KVLayout
from core.messages import Prefill, Role, StepEvents
from core.ports import StepOutput
from core.sampling import Sampling
from core.spec import BatchSpec, ClusterSpec, KVSpec, ModelSpec, PoolSpec
from engine.cuda.transfer import pin
from engine.device import cuda
from engine.device.choice import choose_device
from engine.device.cuda import FlashInferBackend, FlexBackend, cuda_backend
from engine.device.pool import KVPool
from engine.device.runner import auto_dtype
from engine.device.staging import Staged
from engine.loop import Engine
from engine.policy.scheduler import Scheduler
from tests.fakes import flashinfer
from tests.rig.tiny import Oracle, tiny_model
from tests.unit.gpu_help import fake_gpu

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LIMIT_S = 30.0


@pytest.mark.parametrize(
    ("wanted", "sees", "device"),
    [("auto", True, GPU), ("auto", False, CPU), ("cpu", True, CPU), ("cuda", True, GPU)],
)
def test_a_worker_takes_the_gpu_it_sees(
    monkeypatch: pytest.MonkeyPatch, wanted: str, sees: bool, device: torch.device
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees)
    assert choose_device(wanted) == device


def test_a_gpu_that_is_asked_for_and_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no GPU") as refused:
        choose_device("cuda")
    assert refused.value.field == "model.device"


def test_a_gpu_computes_in_bfloat16() -> None:
    assert auto_dtype(GPU) == "bfloat16"


@pytest.mark.parametrize(
    ("dtype", "head_dim", "installed", "kind"),
    [
        ("bfloat16", 64, True, FlashInferBackend),
        ("bfloat16", 64, False, FlexBackend),
        ("bfloat16", 48, True, FlexBackend),
        ("float32", 64, True, FlexBackend),
    ],
)
def test_flashinfer_is_taken_where_it_is_installed_and_serves_the_model(
    monkeypatch: pytest.MonkeyPatch, dtype: str, head_dim: int, installed: bool, kind: type
) -> None:
    monkeypatch.setattr(cuda, "find_spec", lambda name: flashinfer if installed else None)
    monkeypatch.setattr(cuda, "import_module", lambda name: flashinfer)
    pool = KVPool.on(CPU, KVLayout(1, 1, 16, head_dim, dtype), 2)
    backend = cuda_backend(pool)
    assert isinstance(backend, kind)
    assert backend.ops.dtype is pool.kv.dtype


def test_memory_is_pinned_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    register = SimpleNamespace(cudaHostRegister=lambda *args: asked.append(args))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: register)
    monkeypatch.setattr(torch.cuda, "check_error", lambda status: None)
    memory = torch.zeros(3, 1 << 20, dtype=torch.uint8)
    pin(memory)
    assert asked == [(memory.data_ptr(), 3 << 20, 0)]


def test_memory_that_cannot_be_pinned_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(status: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=max))
    monkeypatch.setattr(torch.cuda, "check_error", fail)
    with pytest.raises(ConfigError, match="3 MiB of host memory cannot be pinned: out of") as no:
        pin(torch.zeros(3, 1 << 20, dtype=torch.uint8))
    assert no.value.field == "kv.memory_mb"


def boot_of(folder: Path, tensor_parallel: int = 1) -> WorkerBoot:
    spec = ClusterSpec(
        model=ModelSpec(ref=str(folder), dtype="float32", max_len=100),
        pools=(PoolSpec(Role.HYBRID, 1, tensor_parallel),),
        kv=KVSpec(block_size=4, blocks=30),
        batch=BatchSpec(max_running=4),
    )
    return WorkerBoot(WorkerId("w"), Role.HYBRID, Epoch(1), spec, blocks=30)


def test_a_worker_that_sees_a_gpu_serves_from_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(loaded, "choose_device", lambda wanted: GPU)
    monkeypatch.setattr(loaded, "open_gpu", lambda device: fake_gpu(pinned))
    torch.set_num_threads(1)
    boot, said = boot_of(tiny_model(tmp_path)), []
    model = loaded.load(boot, said.append)
    assert isinstance(model.staging, Staged)
    assert [rows.shape for rows in pinned] == [(30, model.layout.block_bytes)]
    recordings = [f"recording decode steps, {n} of 3" for n in (1, 2, 3)]
    assert said[-4:] == ["warming up", *recordings]
    outputs: SimpleQueue[StepOutput] = SimpleQueue()
    config = loaded.scheduler_config(boot, model, "here")
    scheduler = Scheduler(config, model.arena.generations)
    engine = Engine(scheduler, model.runner, model.layout, time.monotonic, outputs.put)
    prompts = {f"r{n}": tuple(range(n, 2 * n)) for n in (3, 9, 14)}
    engine.start()
    try:
        said_by_name = generate(engine, outputs, prompts)
    finally:
        engine.stop(LIMIT_S)
        model.grammars.close()
    assert said_by_name == {name: Oracle(tmp_path).tokens(p, 6) for name, p in prompts.items()}
    assert not any(model.arena.blocks), "nothing was lent, so nothing left the GPU"


def generate(
    engine: Engine, outputs: SimpleQueue[StepOutput], prompts: dict[str, tuple[int, ...]]
) -> dict[str, list[int]]:
    """Six greedy tokens of each, all at once."""
    sampling = Sampling(max_tokens=6, ignore_eos=True)
    for name, prompt in prompts.items():
        engine.prefill(Prefill(AttemptKey(RequestId(name), 0), prompt, sampling), "me")
    said: dict[str, list[int]] = {name: [] for name in prompts}
    while any(len(tokens) < 6 for tokens in said.values()):
        for _, event in outputs.get(timeout=LIMIT_S).events:
            for each in event.events if isinstance(event, StepEvents) else ():
                said[each.key.request_id] += each.token_ids
    return said


def test_ranks_on_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loaded, "choose_device", lambda wanted: GPU)
    with pytest.raises(ConfigError, match="ranks run on CPUs only") as refused:
        loaded.load(boot_of(tiny_model(tmp_path), tensor_parallel=2), lambda phase: None)
    assert refused.value.field == "pools[0].tensor_parallel"
