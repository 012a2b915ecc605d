"""Which tokens end an answer.

Files often declare the end of a text only; the tokens that end a turn of a chat are then known by
how they are spelled.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.model.reading import read_json

CHAT_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
)
"""Special tokens after which a model has nothing more to say, whatever its files declare."""
_CONTROL = 3
"""`LLAMA_TOKEN_TYPE_CONTROL`: a special token, in GGUF's tokenizer.ggml.token_type."""


def token_ids(value: object) -> tuple[int, ...]:
    """eos_token_id may be absent, a number or a list; sorted."""
    values = value if isinstance(value, list) else [value]
    return tuple(sorted({v for v in values if isinstance(v, int)}))


def in_gguf(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    raw = {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items()}
    declared = [raw.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    kinds = zip(raw.get("tokens", []), raw.get("token_type", []), strict=False)
    ends = [i for i, (text, kind) in enumerate(kinds) if kind == _CONTROL and text in CHAT_ENDS]
    return token_ids([*declared, *ends])


def in_folder(folder: Path, declared: tuple[int, ...]) -> tuple[int, ...]:
    """generation_config.json has the last word; without it, `declared` and what the tokenizer
    says."""
    stated = token_ids(read_json(folder / "generation_config.json").get("eos_token_id"))
    if stated:
        return stated
    tokenizer = read_json(folder / "tokenizer_config.json")
    eos = tokenizer.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    added = tokenizer.get("added_tokens_decoder") or {}
    ends = [
        int(i)
        for i, token in added.items()
        if token.get("content") == text or (token.get("special") and token["content"] in CHAT_ENDS)
    ]
    return token_ids([*declared, *ends])
