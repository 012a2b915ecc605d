"""Pools apart from their arenas: what is lent is in the arena before it is read, what landed is on
the device before it counts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from core.errors import LeaseGone
from core.ids import BlockId, Epoch, LeaseId
from core.kvlayout import KVLayout
from engine.device.pool import KVPool
from engine.device.staging import Copy, InPlace, Staged
from engine.reference import greedy
from tests import models
from tests.rig.tiny import decoder
from tests.unit.expert_help import plain_counts
from tests.unit.gpu_help import fake_gpu, late_copy, pair
from tests.unit.llama_help import random_tokens

LAYOUT = KVLayout(1, 1, 4, 8, "float32", expert_counters=6)
LEASE, EPOCH = LeaseId("l"), Epoch(1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("family", "mover"), [("llama", "shm"), ("llama", "tcp"), ("qwen3_moe", "shm")]
)
def test_prompts_handed_over_give_the_tokens_of_the_plain_loop(
    tmp_path: Path, family: str, mover: str
) -> None:
    """The last ones begin like those before: their blocks are on both devices already."""
    folder = models.make(family, tmp_path / family)
    model = decoder(folder)
    pinned: list[torch.Tensor] = []
    shared = random_tokens(9, 64)
    prompts = [random_tokens(n, n) for n in (1, 16, 40)]
    prompts += [shared + random_tokens(50, 3), shared + random_tokens(51, 20)]
    with pair(str(folder), mover, (fake_gpu(pinned), fake_gpu(pinned))) as workers:
        for i, prompt in enumerate(prompts):
            tokens, grant = workers.generate(f"r{i}", prompt, 5)
            assert tokens == [s.token for s in greedy(model, model.config, prompt, 5, ())]
        assert grant.present_blocks == len(shared) // 16
        full = sum(len(prompt) // 16 for prompt in prompts) - len(shared) // 16
        alike = workers.prefill.rows & workers.decode.rows
        assert len(alike) > full, "blocks came over whole, with what is counted behind them"
        for worker, rows in zip((workers.prefill, workers.decode), pinned, strict=True):
            assert rows is worker.in_arena.rows


def test_expert_counts_come_over_with_their_blocks(tmp_path: Path) -> None:
    folder, prompt = models.make("qwen3_moe", tmp_path), random_tokens(3, 40)
    model = decoder(folder)
    with pair(str(folder), "shm", (fake_gpu([]), fake_gpu([]))) as workers:
        (token, _), _ = workers.generate("r", prompt, 2)
        layout, rows = workers.decode.layout, workers.decode.gpu.pool.rows
        counters = rows[:, layout.kv_bytes :].view(torch.int16)[:, : layout.expert_counters]
    assert tuple(counters.sum(0).tolist()) == plain_counts(model, (*prompt, token))


class Leases:
    """`Landing` of the engine: gives blocks 2 and 0, and looks at the device at the end."""

    def __init__(self, device: KVPool) -> None:
        self._device = device
        self.ends: list[tuple[bool, list[int]]] = []
        self.gone = False

    def begin(
        self, lease_id: LeaseId, epoch: Epoch, first_index: int, count: int
    ) -> tuple[BlockId, ...]:
        if self.gone:
            raise LeaseGone("it ended")
        return (BlockId(2), BlockId(0))

    def end(self, lease_id: LeaseId, first_index: int, count: int, ok: bool) -> None:
        self.ends.append((ok, self._device.rows[:, 0].tolist()))


def staged(copy: Copy = late_copy) -> tuple[Staged, KVPool, KVPool]:
    arena = KVPool(LAYOUT, 3, memoryview(bytearray(3 * LAYOUT.block_bytes)))
    device = KVPool.on(torch.device("cpu"), LAYOUT, 4)
    return Staged(device, arena, copy), device, arena


def test_blocks_are_on_the_device_when_they_count_as_landed() -> None:
    staging, device, arena = staged()
    leases = Leases(device)
    landing = staging.landing(leases)
    landing.begin(LEASE, EPOCH, 0, 2)
    arena.rows[:] = torch.tensor([5, 6, 7])[:, None]
    assert not device.rows.any()
    landing.end(LEASE, 0, 2, ok=True)
    assert leases.ends == [(True, [5, 0, 7, 0])]
    assert torch.equal(device.rows[0], arena.rows[0]), "counters and all"


def test_what_never_landed_is_not_brought_in() -> None:
    staging, device, arena = staged()
    leases = Leases(device)
    landing = staging.landing(leases)
    arena.rows.fill_(9)
    landing.begin(LEASE, EPOCH, 0, 2)
    landing.end(LEASE, 0, 2, ok=False)
    assert leases.ends == [(False, [0, 0, 0, 0])]


def test_a_copy_that_fails_ends_the_write_as_one_that_never_landed() -> None:
    def fail(target: torch.Tensor, source: torch.Tensor, ids: object) -> None:
        raise RuntimeError("device gone")

    staging, device, _ = staged(fail)
    leases = Leases(device)
    landing = staging.landing(leases)
    landing.begin(LEASE, EPOCH, 0, 2)
    landing.end(LEASE, 0, 2, ok=True)
    assert [ok for ok, _ in leases.ends] == [False]


def test_a_lease_that_is_gone_is_heard_of() -> None:
    staging, device, _ = staged()
    leases = Leases(device)
    leases.gone = True
    with pytest.raises(LeaseGone):
        staging.landing(leases).begin(LEASE, EPOCH, 0, 2)


def test_lent_blocks_are_in_the_arena_after_the_wait() -> None:
    staging, device, arena = staged()
    device.rows[:] = torch.tensor([5, 6, 7, 8])[:, None]
    wait = staging.send_out((BlockId(2), BlockId(0)))
    wait()
    assert arena.rows[:, 0].tolist() == [5, 0, 7]
    staging.send_out(())()
    assert arena.rows[:, 0].tolist() == [5, 0, 7]


def test_a_pool_in_the_arena_needs_nothing() -> None:
    leases = Leases(staged()[1])
    assert InPlace().landing(leases) is leases
    InPlace().send_out((BlockId(1),))()
