"""Where the KV of a block lies in memory.  Pure arithmetic shared by engine and transport.

Pool shape: [blocks, layers, 2 (K, V), kv_heads, block_size, head_dim].  Block-major: all layers
of a block are contiguous, so one block is one byte range, however it travels.  What belongs to a
block besides its KV (how often its tokens chose which expert) lies behind it, in the same range,
so that it stays with the block through prefix hits and hand-overs.
"""

from dataclasses import dataclass, fields
from hashlib import blake2b

from core.errors import Incompatible, Stage

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
COUNTER_BYTES = 2


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one worker's KV pool, without the number of blocks.

    expert_counters: 16-bit counters behind each block, one per MoE layer and expert.
    """

    layers: int
    kv_heads: int
    block_size: int
    head_dim: int
    dtype: str
    expert_counters: int = 0

    @property
    def page_bytes(self) -> int:
        """K or V of one layer and head."""
        return self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def kv_bytes(self) -> int:
        """The KV of one block."""
        return self.layers * 2 * self.kv_heads * self.page_bytes

    @property
    def block_bytes(self) -> int:
        """One block with its counters, padded to whole pages."""
        pages = -(-self.expert_counters * COUNTER_BYTES // self.page_bytes)
        return self.kv_bytes + pages * self.page_bytes

    @property
    def digest(self) -> int:
        """64 bits that a frame header carries; equal layouts have equal digests."""
        text = "/".join(str(getattr(self, f.name)) for f in fields(self))
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class Compatibility:
    """What two processes must agree on before any KV moves between them.

    tensor_parallel: parts that the KV of a block lies in.  One where all ranks of a worker write
    the same arena, however many they are.
    """

    wire_version: int
    model_digest: str
    kv_variant: str
    layout: KVLayout
    tensor_parallel: int = 1
    codec: str = "none"

    def check(self, peer: "Compatibility", worker: str = "") -> None:
        """Raises Incompatible naming the first field that differs, and both values."""
        for name, mine, theirs in (*_differences(self, peer),):
            raise Incompatible(
                f"{name} differs: {mine!r} here, {theirs!r} there; start both with the same value",
                stage=Stage.START,
                worker=worker,
                field=name,
            )


def _differences(a: Compatibility, b: Compatibility) -> list[tuple[str, object, object]]:
    pairs = [(f.name, getattr(a, f.name), getattr(b, f.name)) for f in fields(a)]
    flat = [p for p in pairs if p[0] != "layout"]
    flat += [
        (f"layout.{f.name}", getattr(a.layout, f.name), getattr(b.layout, f.name))
        for f in fields(KVLayout)
    ]
    return [(name, mine, theirs) for name, mine, theirs in flat if mine != theirs]
