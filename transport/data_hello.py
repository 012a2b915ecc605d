"""How a data connection opens.  No I/O.

    destination ── challenge: 16 random bytes ──▶ source
    destination ◀── hello: who, geometry, HMAC ── source     (shm: the arena's fd comes with it)
    destination ── answer (frame.Answer, 0) ────▶ source
The link key came over the authenticated session.  It is never sent; its id is a hash of it.
"""

import hmac
import struct
from dataclasses import dataclass

from core.errors import Stage, TransferFailed
from transport.arena import Geometry

CHALLENGE_BYTES = 16
MIN_KEY_BYTES = 16
_HEAD = struct.Struct("<4s8sIQ")  # magic and version, key id, blocks, block bytes
_PROOF_BYTES = 32
_MAGIC = b"TrH\x01"
HELLO_BYTES = _HEAD.size + _PROOF_BYTES


@dataclass(frozen=True, slots=True)
class Hello:
    """A claim, to be trusted only after `proves`."""

    key_id: bytes
    geometry: Geometry
    head: bytes
    proof: bytes

    def proves(self, link_key: bytes, challenge: bytes, mover: str) -> bool:
        """Whether the sender has the key and answers this challenge over this backend."""
        return hmac.compare_digest(self.proof, _proof(link_key, challenge, mover, self.head))


def key_id(link_key: bytes) -> bytes:
    """8 bytes that name a key and do not give it away."""
    return hmac.digest(link_key, b"trireme link key id", "sha256")[:8]


def encode_hello(geometry: Geometry, link_key: bytes, challenge: bytes, mover: str) -> bytes:
    head = _HEAD.pack(_MAGIC, key_id(link_key), geometry.blocks, geometry.block_bytes)
    return head + _proof(link_key, challenge, mover, head)


def decode_hello(data: bytes) -> Hello:
    """Raises TransferFailed when this is no hello."""
    if len(data) != HELLO_BYTES or not data.startswith(_MAGIC):
        raise TransferFailed("not a hello of this version; close it", stage=Stage.TRANSFER)
    head = data[: _HEAD.size]
    _, name, blocks, block_bytes = _HEAD.unpack(head)
    return Hello(name, Geometry(blocks, block_bytes), head, data[_HEAD.size :])


def _proof(link_key: bytes, challenge: bytes, mover: str, head: bytes) -> bytes:
    return hmac.digest(link_key, challenge + mover.encode() + b"\0" + head, "sha256")
