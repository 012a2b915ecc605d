"""The vocabulary in a GGUF file's metadata as a `tokenizers` tokenizer: byte-level BPE, or
SentencePiece's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE

from core.errors import ModelUnsupported, Stage
from engine.text import alphabet, sentencepiece
from engine.text.pretokenizers import CUTS, Cut

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""Token types of llama.cpp: pieces of text, special tokens, and plain text that is never cut."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """bos_id: the token to put before every prompt, if the file, or else the kind of vocabulary,
    asks for one.  to_bytes: how tokens spell bytes."""

    backend: Tokenizer
    bos_id: int | None
    to_bytes: alphabet.ToBytes


def build(metadata: Mapping[str, Any], model: str) -> Vocabulary:
    """Raises ModelUnsupported when the vocabulary is of another kind, cut in another way, or
    does not fit together."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    if kind == "gpt2":
        cut = _cut(metadata, model)
        backend, adds_bos = _byte_level(metadata, cut, model), cut.add_bos
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(metadata), True
    else:
        supported = "gpt2 (byte-level BPE), llama (SentencePiece)"
        raise _unsupported(model, f"tokenizer type {kind!r}", supported)
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in zip(tokens, kinds, strict=False)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
    return Vocabulary(
        backend,
        metadata.get("tokenizer.ggml.bos_token_id") if adds_bos else None,
        alphabet.byte_level if kind == "gpt2" else alphabet.sentencepiece,
    )


def variables(metadata: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and eos_token, as chat templates name them."""
    tokens = dict(enumerate(metadata.get("tokenizer.ggml.tokens", [])))
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return {f"{name}_token": tokens[i] for name, i in ids.items() if i in tokens}


def _byte_level(metadata: Mapping[str, Any], cut: Cut, model: str) -> Tokenizer:
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    merges = [tuple(m.split(" ", 1)) for m in metadata.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=cut.ignore_merges))
    # The library raises bare Exception for a merge of unknown tokens.
    except Exception as error:
        raise _unsupported(model, f"unusable merges ({error})", "merges of its tokens") from error
    tokenizer.pre_tokenizer = cut.pre_tokenizer
    if cut.normalizer is not None:
        tokenizer.normalizer = cut.normalizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _cut(metadata: Mapping[str, Any], model: str) -> Cut:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in CUTS:
        raise _unsupported(model, f"pre-tokenizer {name!r}", ", ".join(CUTS))
    return CUTS[name]


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    raw = {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items()}
    tokens: list[str] = raw.get("tokens", [])
    kinds = raw.get("token_type") or [_NORMAL] * len(tokens)
    pieces = zip(tokens, raw.get("scores", []), kinds, strict=False)
    unknown = dict(enumerate(tokens)).get(raw.get("unknown_token_id", -1))
    return sentencepiece.build(
        {token: i for i, token in enumerate(tokens)},
        {token: score for token, score, kind in pieces if kind == _NORMAL},
        unknown,
        raw.get("add_space_prefix", True),
    )


def _unsupported(model: str, what: str, supported: str) -> ModelUnsupported:
    return ModelUnsupported(
        f"model {model}: its GGUF file has {what}; supported: {supported}; "
        "give the model's Hugging Face folder, which has a tokenizer.json",
        stage=Stage.START,
        field="model.ref",
    )
