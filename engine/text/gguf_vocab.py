"""A `tokenizers` tokenizer from the vocabulary in a GGUF file's metadata: byte-level BPE."""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE

from core.errors import ModelUnsupported, Stage
from engine.text.pretokenizers import CUTS, Cut

_CONTROL, _USER_DEFINED = 3, 4
"""Token types of llama.cpp: special tokens, and plain text that is never cut."""


def build(metadata: Mapping[str, Any], model: str) -> Tokenizer:
    """Raises ModelUnsupported when the vocabulary is of another kind, cut in another way, or
    does not fit together."""
    cut = _cut(metadata, model)
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
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in zip(tokens, kinds, strict=False)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer


def bos_id(metadata: Mapping[str, Any], model: str) -> int | None:
    """The token to put before every prompt, if the file, or else the kind of vocabulary, asks."""
    add = metadata.get("tokenizer.ggml.add_bos_token", _cut(metadata, model).add_bos)
    return metadata.get("tokenizer.ggml.bos_token_id") if add else None


def variables(metadata: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and eos_token, as chat templates name them."""
    tokens = dict(enumerate(metadata.get("tokenizer.ggml.tokens", [])))
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return {f"{name}_token": tokens[i] for name, i in ids.items() if i in tokens}


def _cut(metadata: Mapping[str, Any], model: str) -> Cut:
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise _unsupported(model, f"tokenizer type {kind!r}", "gpt2 (byte-level BPE)")
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in CUTS:
        raise _unsupported(model, f"pre-tokenizer {name!r}", ", ".join(CUTS))
    return CUTS[name]


def _unsupported(model: str, what: str, supported: str) -> ModelUnsupported:
    return ModelUnsupported(
        f"model {model}: its GGUF file has {what}; supported: {supported}; "
        "give the model's Hugging Face folder, which has a tokenizer.json",
        stage=Stage.START,
        field="model.ref",
    )
