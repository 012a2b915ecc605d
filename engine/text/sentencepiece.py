"""A `tokenizers` tokenizer of a SentencePiece BPE vocabulary: pieces with scores, but no merges
(Kudo & Richardson, arXiv:1808.06226).

SentencePiece merges neighbours whose texts together are a piece, the best score first.  The same
as merges: each way to cut a piece into two pieces, by falling score of the whole; of one piece the
longest left part first, as transformers orders them.
"""

from collections.abc import Iterator, Mapping

from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE


def build(
    pieces: Mapping[str, int], scores: Mapping[str, float], unknown: str | None, prefix: bool
) -> Tokenizer:
    """pieces: all with their ids.  scores: of those that may be merged from others; those that
    are found whole in the text, such as special tokens, have none.  prefix: a text begins with a
    blank that it does not have.

    Characters that are no piece are spelled as bytes: pieces "<0x00>" to "<0xFF>".
    """
    model = BPE(
        dict(pieces), list(_merges(scores)), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="first" if prefix else "never", split=False
    )
    return tokenizer


def _merges(scores: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    for piece in sorted(scores, key=lambda piece: -scores[piece]):
        for cut in range(len(piece) - 1, 0, -1):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                yield left, right
