"""French sentences: the messages of two programs, out of the catalogues in their packages."""

import re
import struct
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from benchmarks.learned_moe.digest import digest

PACKAGES = {"indico": "3.2.9", "jupyterlab-language-pack-fr-FR": "4.5.post3"}
INSTALL = "pip install --no-deps " + " ".join(f"{n}=={v}" for n, v in PACKAGES.items())
_CATALOGUE = "*/fr_FR/LC_MESSAGES/*.mo"
_SENTENCE = re.compile(r"[^<>\n]{24,}")
_LINES = 16
"""Messages to a document."""


class MissingText(Exception):
    """A package that holds training text is not installed."""


def documents() -> Iterator[str]:
    """Raises MissingText with the command that installs what is missing."""
    found = {text for name in PACKAGES for path in _catalogues(name) for text in messages(path)}
    kept = sorted(filter(_SENTENCE.fullmatch, found), key=digest)
    for start in range(0, len(kept), _LINES):
        yield "\n".join(kept[start : start + _LINES])


def messages(catalogue: Path) -> Iterator[str]:
    """The translations, every plural form by itself, of a little-endian .mo file.

    Format: "The Format of GNU MO Files" in the manual of GNU gettext.
    """
    data = catalogue.read_bytes()
    count, table = struct.unpack_from("<8xI4xI", data)
    for entry in range(count):
        length, at = struct.unpack_from("<2I", data, table + 8 * entry)
        yield from data[at : at + length].decode().split("\0")


def _catalogues(package: str) -> list[Path]:
    try:
        paths = files(package) or []
    except PackageNotFoundError as error:
        raise MissingText(f"French text: {package} is not installed; run: {INSTALL}") from error
    return [Path(str(p.locate())) for p in paths if p.match(_CATALOGUE)]
