"""How text is cut before byte-pair merging, by the name GGUF files give it (tokenizer.ggml.pre).

Each entry restates what the models' own tokenizer.json does; llama.cpp's llama-vocab.cpp has the
same splits.  transformers' GGUF loader knows no "smollm" and does not cut digits off there, so
that runs of blanks before a digit come out otherwise than the model was trained on.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_REGEX = _LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class Cut:
    """ignore_merges: a piece that is a token stays one, even if no merges lead to it.
    add_bos: what holds when the file does not say."""

    pre_tokenizer: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False
    add_bos: bool = False


def _split(regex: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_LLAMA3 = Cut(_split(_LLAMA3_REGEX), ignore_merges=True, add_bos=True)

CUTS: Mapping[str, Cut] = {
    "default": Cut(_GPT2),
    "gpt-2": Cut(_GPT2),
    "smollm": Cut(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2])),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": Cut(_split(_QWEN2_REGEX), normalizer=normalizers.NFC()),
}
