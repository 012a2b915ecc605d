"""Chained block hashes: one identity for a prefix in worker cache, router and ticket.

hash_i = blake2b-128(hash_{i-1} || tokens of block i); hash_{-1} is a seed over everything that
changes what the KV of the same tokens is.  Every seed part is length-prefixed, so that
("ab", "c") and ("a", "bc") differ (vllm#44701).  128 bits: a collision would hand one tenant
another tenant's KV, hence no fast non-cryptographic hash.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from core.ids import BlockHash

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class PrefixScope:
    """What besides the tokens determines the KV."""

    model_digest: str
    kv_variant: str
    adapter: str = ""
    salt: str = ""

    def seed(self) -> BlockHash:
        h = blake2b(b"trireme.prefix.v1", digest_size=_DIGEST_BYTES)
        for part in (self.model_digest, self.kv_variant, self.adapter, self.salt):
            raw = part.encode()
            h.update(len(raw).to_bytes(8, "little"))
            h.update(raw)
        return BlockHash(h.digest())


def chain(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """Hash of one full block of token ids that follows `parent`."""
    h = blake2b(parent, digest_size=_DIGEST_BYTES)
    h.update(array("I", tokens).tobytes())
    return BlockHash(h.digest())


def block_hashes(seed: BlockHash, tokens: Sequence[int], block_size: int) -> list[BlockHash]:
    """Hashes of the full blocks of `tokens`; a trailing partial block has none."""
    hashes: list[BlockHash] = []
    parent = seed
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = chain(parent, tokens[start : start + block_size])
        hashes.append(parent)
    return hashes
