"""What the model reads: four domains, from sources whose licences allow it.

Nothing is fetched.  English prose and Python code come with the interpreter, French comes with
two packages, sums are made by seed.  The same interpreter and packages give the same text.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.learned_moe import french, stdlib_text, sums
from benchmarks.learned_moe.digest import digest, is_held_out

ORIGINS = {
    "prose": "Python's language reference and docstrings (PSF licence)",
    "code": "Python's standard library, docstrings taken out (PSF licence)",
    "sums": "made by benchmarks/learned_moe/sums.py",
    "french": "messages of Indico (MIT licence) and JupyterLab (BSD licence)",
}
DOMAINS = tuple(ORIGINS)
_SUMS_DOCUMENTS = 4000
_HELD_OUT_SUMS = 200


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents of one domain; no document of one side occurs on the other."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


def corpora() -> dict[str, Corpus]:
    """By domain, in the order of DOMAINS.  Raises MissingText naming the package to install."""
    source = random.Random(0)
    return {
        "prose": _split(stdlib_text.prose()),
        "code": _split(stdlib_text.code()),
        "sums": Corpus(
            sums.documents(sums.problems(held_out=False), _SUMS_DOCUMENTS, source),
            sums.documents(sums.problems(held_out=True), _HELD_OUT_SUMS, source),
        ),
        "french": _split(french.documents()),
    }


def _split(documents: Iterable[str]) -> Corpus:
    """Without duplicates, in an order that depends on the texts alone."""
    ordered = sorted(set(documents), key=digest)
    return Corpus(
        tuple(d for d in ordered if not is_held_out(d)), tuple(filter(is_held_out, ordered))
    )
