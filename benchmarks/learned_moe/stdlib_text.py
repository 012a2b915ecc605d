"""English prose and Python code out of the running interpreter's standard library."""

import ast
import pydoc_data.topics
import re
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

_PARAGRAPH = re.compile(r"[A-Z].{80,}[.:]")
_NOT_PROSE = re.compile(r"::=|>>>|->|[=|_/{]{2}")
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def prose() -> Iterator[str]:
    """A document for each topic of the language reference, one for each module's docstrings."""
    topics = ([topic] for topic in pydoc_data.topics.topics.values())
    return filter(None, map(_paragraphs, chain(topics, map(_docstrings, _modules()))))


def code() -> Iterator[str]:
    """A document for each class and function at the top of a module: bare code."""
    for module in _modules():
        for node in module.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                yield ast.unparse(_Bare().visit(node))


def _modules() -> Iterator[ast.Module]:
    """Those at the top of the library; packages, and with them the tests, are left out."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield ast.parse(path.read_text("utf-8"))


def _docstrings(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, _Documented):
            yield ast.get_docstring(node) or ""


def _paragraphs(texts: Iterable[str]) -> str:
    """The paragraphs that read as prose, one a line."""
    pieces = (" ".join(p.split()) for text in texts for p in re.split(r"\n\s*\n", text))
    kept = (p for p in pieces if _PARAGRAPH.fullmatch(p) and not _NOT_PROSE.search(p))
    return "\n".join(dict.fromkeys(kept))


class _Bare(ast.NodeTransformer):
    """Takes docstrings out; comments are no part of the tree."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, _Documented) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node
