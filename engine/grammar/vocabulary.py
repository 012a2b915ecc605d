"""What grammars must know of a model's tokens."""

from dataclasses import dataclass

from core.errors import ModelUnsupported, Stage
from core.ports import Tokenizer
from engine.model.refs import ModelFiles
from engine.text.load import load_tokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """tokens: the bytes of each id, as many as the model has logits; b"" for special tokens and
    for ids without a token, none of which a grammar ever allows.  eos_ids: what ends an output.
    """

    tokens: tuple[bytes, ...]
    eos_ids: tuple[int, ...]

    @staticmethod
    def of(tokenizer: Tokenizer) -> "Vocabulary":
        return Vocabulary(
            tuple(tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)),
            tuple(sorted(tokenizer.eos_ids)),
        )


def read_vocabulary(files: ModelFiles) -> Vocabulary:
    """Takes about a second.  Raises ModelUnsupported when the model has no usable tokenizer, or
    names no end of sequence."""
    vocabulary = Vocabulary.of(load_tokenizer(files))
    if not vocabulary.eos_ids:
        raise ModelUnsupported(
            f"model {files.name} names no end-of-sequence token, and no grammar can end without; "
            "add eos_token_id to its config",
            stage=Stage.QUEUE,
            field="model.ref",
        )
    return vocabulary
