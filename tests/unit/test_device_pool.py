"""The pool is a view: block i is one byte range of the buffer, and the buffer must be able."""

import pytest
import torch

from core.errors import InternalError
from core.kvlayout import KVLayout
from engine.device.pool import KVPool


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_is_one_byte_range_of_the_buffer(dtype: str) -> None:
    layout = KVLayout(layers=2, kv_heads=3, block_size=4, head_dim=8, dtype=dtype)
    data = bytearray(5 * layout.block_bytes)
    pool = KVPool(layout, 5, memoryview(data))
    assert pool.kv.shape == (5, 2, 2, 3, 4, 8)
    pool.kv[3] = 1.0
    touched = [i for i, byte in enumerate(data) if byte]
    assert 3 * layout.block_bytes <= touched[0]
    assert touched[-1] == 4 * layout.block_bytes - 1
    assert len(touched) == pool.kv[3].numel() * 2  # 1.0 has two bytes that are not zero


def test_bytes_that_land_in_the_buffer_are_seen_in_the_pool() -> None:
    layout = KVLayout(layers=1, kv_heads=1, block_size=2, head_dim=4, dtype="float32")
    data = bytearray(2 * layout.block_bytes)
    pool = KVPool(layout, 2, memoryview(data))
    values = torch.arange(16, dtype=torch.float32)
    data[layout.block_bytes :] = values.numpy().tobytes()
    assert torch.equal(pool.kv[1].flatten(), values)


@pytest.mark.parametrize(
    "buffer",
    [memoryview(bytearray(1023)), memoryview(bytes(1024))],
    ids=["too_small", "read_only"],
)
def test_a_buffer_that_cannot_hold_the_pool_is_refused(buffer: memoryview) -> None:
    layout = KVLayout(layers=1, kv_heads=1, block_size=4, head_dim=32, dtype="float32")
    with pytest.raises(InternalError, match="1024 writable bytes"):
        KVPool(layout, 1, buffer)
