"""From a model's files to its tokenizer.  Imports no torch: this runs on the edge."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from engine.model import families
from engine.model.config_file import load_config
from engine.model.gguf_header import read_header
from engine.model.reading import read_json, unsupported
from engine.model.refs import ModelFiles
from engine.text import alphabet, gguf_vocab
from engine.text.template import ChatTemplate
from engine.text.tokenizer import TextFacts, TextTokenizer


def load_tokenizer(files: ModelFiles) -> TextTokenizer:
    """Raises ModelUnsupported naming what the model has that is not supported."""
    return _from_gguf(files) if files.kind == "gguf" else _from_folder(files)


def _from_gguf(files: ModelFiles) -> TextTokenizer:
    header = read_header(files.path)
    config, metadata = families.from_gguf(header, files.name), header.metadata
    vocabulary = gguf_vocab.build(metadata, files.name)
    source = metadata.get("tokenizer.chat_template")
    variables = gguf_vocab.variables(metadata)
    facts = TextFacts(
        model=files.name,
        vocab_size=config.vocab_size,
        bos_id=vocabulary.bos_id,
        eos_ids=frozenset(config.eos_ids),
        to_bytes=vocabulary.to_bytes,
        template=ChatTemplate(source, variables) if source else None,
    )
    return TextTokenizer(vocabulary.backend, facts)


def _from_folder(files: ModelFiles) -> TextTokenizer:
    config = load_config(files)
    backend = _read_backend(files)
    settings = read_json(files.path / "tokenizer_config.json")
    source = _template_source(files.path, settings)
    names = ("bos_token", "eos_token")
    variables = {n: t for n in names if (t := _content(settings.get(n)))}
    facts = TextFacts(
        model=files.name,
        vocab_size=config.vocab_size,
        bos_id=_folder_bos(backend, settings),
        eos_ids=frozenset(config.eos_ids),
        to_bytes=_to_bytes(backend, files.name),
        template=ChatTemplate(source, variables) if source else None,
    )
    return TextTokenizer(backend, facts)


def _read_backend(files: ModelFiles) -> tokenizers.Tokenizer:
    path = files.path / "tokenizer.json"
    if not path.is_file():
        why = "it has no tokenizer.json; save it from transformers with save_pretrained"
        raise unsupported(files.name, why)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    # The library raises bare Exception for every kind of bad file.
    except Exception as error:
        raise unsupported(files.name, f"its tokenizer.json is not usable ({error})") from error


def _to_bytes(backend: tokenizers.Tokenizer, model: str) -> alphabet.ToBytes:
    """How the vocabulary spells bytes is known by how it is decoded."""
    decoder = backend.decoder
    steps = json.loads(decoder.__getstate__()) if decoder is not None else {}
    kinds = {step["type"] for step in steps.get("decoders", [steps]) if "type" in step}
    if "ByteLevel" in kinds:
        return alphabet.byte_level
    if kinds & {"ByteFallback", "Metaspace"}:
        return alphabet.sentencepiece
    raise unsupported(model, f"its tokenizer has the decoder {sorted(kinds)}, not byte-level BPE")


def _folder_bos(backend: tokenizers.Tokenizer, settings: dict[str, Any]) -> int | None:
    """tokenizer_config.json decides; without its word, what tokenizer.json puts around ""."""
    token = _content(settings.get("bos_token"))
    bos = backend.token_to_id(token) if token else None
    implied = bos in backend.encode("", add_special_tokens=True).ids
    return bos if settings.get("add_bos_token", implied) else None


def _content(token: object) -> str | None:
    """Special tokens are saved as text, or as objects that hold it."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _template_source(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja, or else the template, of several the default, in the settings."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = {t["name"]: t["template"] for t in found}.get("default")
    return found
