"""The texts that come with the model: a few pages of each domain that it was not trained on."""

import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks.learned_moe.corpus import ORIGINS, Corpus

_CHARACTERS = 13_000
"""Of each domain, at most."""
_FILE = "held_out.json"


def write(corpora: Mapping[str, Corpus], folder: Path) -> None:
    texts = {name: _first(corpus.held_out) for name, corpus in corpora.items()}
    content = {"origins": ORIGINS, "licences": "see LICENSES.md", "texts": texts}
    serial = json.dumps(content, ensure_ascii=False, indent=1)
    (folder / _FILE).write_text(serial + "\n", "utf-8")


def read(folder: Path) -> dict[str, list[str]]:
    """Documents by domain."""
    texts: dict[str, list[str]] = json.loads((folder / _FILE).read_text("utf-8"))["texts"]
    return texts


def _first(documents: tuple[str, ...]) -> list[str]:
    """Whole documents, but for the last."""
    kept: list[str] = []
    left = _CHARACTERS
    for document in documents:
        if left > 0:
            kept.append(document[:left])
            left -= len(document)
    return kept
