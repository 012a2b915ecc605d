"""The arena: its owner writes, peers read, nobody resizes."""

import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

from core.errors import ConfigError, TransferFailed, WorkerLost
from transport.arena import Geometry, MemfdArena, map_peer, map_rank


@pytest.fixture
def arena():
    made = MemfdArena.create(10, 1000)
    yield made
    made.close()


def test_a_new_arena_is_zero_and_laid_out_as_described(arena: MemfdArena) -> None:
    assert (arena.generations.format, len(arena.generations)) == ("Q", 10)
    assert (arena.blocks.format, len(arena.blocks)) == ("B", 10_000)
    assert bytes(arena.generations) == bytes(80)
    assert bytes(arena.blocks) == bytes(10_000)
    assert arena.geometry.table_bytes == mmap.PAGESIZE


@pytest.mark.parametrize("blocks", [1, 510, 511, 512, 1023, 5000])
def test_blocks_start_on_a_page_behind_the_whole_table(blocks: int) -> None:
    geometry = Geometry(blocks, 64)
    assert geometry.table_bytes % mmap.PAGESIZE == 0
    assert (blocks + 1) * 8 <= geometry.table_bytes < (blocks + 1) * 8 + mmap.PAGESIZE


def test_a_peer_sees_what_the_owner_writes_later(arena: MemfdArena) -> None:
    peer = map_peer(arena.fd, arena.geometry)
    arena.blocks[3000:4000] = b"x" * 1000
    arena.generations[9] = 2**64 - 1
    assert bytes(peer.block(3)) == b"x" * 1000
    assert peer.generations[9] == 2**64 - 1
    assert peer.beacon == arena.beacon
    peer.close()


def test_ranks_that_map_it_before_it_is_sealed_write_to_it() -> None:
    geometry = Geometry(10, 1000)
    ranks = []
    arena = MemfdArena.create(10, 1000, share=lambda fd: ranks.append(map_rank(fd, geometry)))
    ranks[0].block(3)[:] = b"x" * 1000
    assert bytes(arena.block(3)) == b"x" * 1000
    with pytest.raises(PermissionError):
        map_rank(arena.fd, geometry)
    ranks[0].close()
    arena.close()


def test_an_arena_whose_ranks_are_lost_is_not_made() -> None:
    descriptors: list[int] = []

    def share(fd: int) -> None:
        descriptors.append(fd)
        raise WorkerLost("rank 1 ended")

    with pytest.raises(WorkerLost):
        MemfdArena.create(10, 1000, share=share)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[0])


def test_a_peer_cannot_write_resize_or_map_for_writing(arena: MemfdArena) -> None:
    peer = map_peer(arena.fd, arena.geometry)
    with pytest.raises(TypeError):
        peer.blocks[0] = 1
    with pytest.raises(PermissionError):
        os.pwrite(arena.fd, b"x", 0)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    with pytest.raises(PermissionError):
        mmap.mmap(arena.fd, arena.geometry.total_bytes, flags=mmap.MAP_SHARED)
    peer.close()


def test_pages_outlive_their_owner(arena: MemfdArena) -> None:
    code = (
        "import sys; from transport.arena import Geometry, map_peer;"
        "peer = map_peer(int(sys.argv[1]), Geometry(10, 1000)); sys.stdin.read();"
        "print(bytes(peer.block(9)) == bytes([7]) * 1000)"
    )
    arena.blocks[9000:] = bytes([7]) * 1000
    reader = subprocess.Popen(
        [sys.executable, "-c", code, str(arena.fd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[arena.fd],
    )
    out, _ = reader.communicate(b"", timeout=60)
    assert out.strip() == b"True"


def test_two_arenas_have_different_beacons(arena: MemfdArena) -> None:
    other = MemfdArena.create(10, 1000)
    assert other.beacon != arena.beacon
    other.close()


@pytest.mark.parametrize("block_id", [-1, 10, 2**40])
def test_a_block_that_does_not_exist_is_an_error_that_names_it(
    arena: MemfdArena, block_id: int
) -> None:
    with pytest.raises(TransferFailed, match=f"block {block_id} is out of range"):
        arena.block(block_id)


@pytest.mark.parametrize(
    "geometry", [Geometry(10, 999), Geometry(11, 1000), Geometry(2**32 - 1, 2**63)], ids=str
)
def test_a_claimed_geometry_that_is_not_the_arenas_is_refused(
    arena: MemfdArena, geometry: Geometry
) -> None:
    with pytest.raises(TransferFailed, match="not a sealed arena"):
        map_peer(arena.fd, geometry)


def test_what_is_no_memfd_is_refused(tmp_path) -> None:
    geometry = Geometry(10, 1000)
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(geometry.total_bytes)
        with pytest.raises(TransferFailed):
            map_peer(file.fileno(), geometry)
    with pytest.raises(TransferFailed):
        map_peer(-1, geometry)


def test_an_impossible_size_is_a_configuration_error_and_leaks_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError) as caught:
        MemfdArena.create(2**40, 2**40)
    assert caught.value.field == "kv.memory_mb"
    assert len(os.listdir("/proc/self/fd")) == before


def test_closing_gives_descriptors_back_and_spares_views_in_use() -> None:
    before = len(os.listdir("/proc/self/fd"))
    arena = MemfdArena.create(10, 1000)
    view = np.frombuffer(arena.blocks, np.uint8)
    view[:] = 3
    arena.close()
    arena.close()
    assert int(view.sum()) == 30_000
    del view, arena
    assert len(os.listdir("/proc/self/fd")) == before
