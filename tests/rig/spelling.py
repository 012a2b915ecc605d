"""A tokenizer for the tiny model, whose tokens a test chooses."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.text.alphabet import BYTE_OF

SPECIALS = ("<s>", "</s>")
_CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}


def give_tokenizer(folder: Path, tokens: Sequence[bytes]) -> Path:
    """tokens: by id, after the two special ones; none comes about by merging others."""
    spelled = ["".join(_CHARACTER_OF[b] for b in token) for token in tokens[len(SPECIALS) :]]
    vocabulary = {token: i for i, token in enumerate((*SPECIALS, *spelled))}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
