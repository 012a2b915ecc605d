"""From the spelling of a token in the vocabulary to the bytes it stands for."""

import re
from collections.abc import Callable

ToBytes = Callable[[str], bytes]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's byte-level BPE: printable Latin-1 characters stand for
    themselves, the other bytes, in order, for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    spelled = {chr(b): b for b in printable}
    return spelled | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_OF = _byte_alphabet()


def byte_level(token: str) -> bytes:
    """A token of a byte-level vocabulary.  One that is not spelled in the alphabet is taken
    literally, as the decoders of llama.cpp and of `tokenizers` do."""
    try:
        return bytes(BYTE_OF[c] for c in token)
    except KeyError:
        return token.encode()


def sentencepiece(token: str) -> bytes:
    """A token of a SentencePiece vocabulary: "<0x0A>" is a byte, "\u2581" a space."""
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()
