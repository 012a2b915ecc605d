"""Token ids to visible text, incrementally.  Pure."""

import codecs
from collections.abc import Iterable

from core.ports import Tokenizer


class Detokenizer:
    """Text of one output.  Holds back an incomplete UTF-8 sequence until its last byte.

    concat of all `push` and the `finish` == the output's bytes decoded at once, with U+FFFD for
    what is not UTF-8.  So the cuts between tokens, and between batches, cannot be seen.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; may be empty."""
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, ids)))

    def finish(self) -> str:
        """U+FFFD for a sequence that nothing completed, or nothing."""
        return self._decoder.decode(b"", final=True)
