"""Order and held-out membership by content, so that every machine agrees."""

from hashlib import blake2b

_ONE_IN = 16


def digest(text: str) -> int:
    """64 bits of the content."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def is_held_out(text: str) -> bool:
    return digest(text) % _ONE_IN == 0
