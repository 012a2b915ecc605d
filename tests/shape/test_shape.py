"""The shape of the code as tests: names, sizes, and what is light to import."""

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("core", "engine", "transport", "router", "actors", "cluster")
LIGHT = ("core.spec", "engine.policy.scheduler", "router.app", "router.dispatch", "cluster.cli")
HEAVY = ("torch", "ray", "transformers")
MAX_FILE_LINES = 330
MAX_FUNCTION_LINES = 45


def sources() -> list[Path]:
    found = [p for name in PACKAGES for p in (ROOT / name).rglob("*.py")]
    return [p for p in found if "_pb2" not in p.name]


@pytest.mark.parametrize("name", PACKAGES)
def test_no_other_distribution_owns_our_import_names(name: str) -> None:
    owners = set(importlib.metadata.packages_distributions().get(name, ()))
    assert owners <= {"trireme-serve"}


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert answer.stdout.strip() == "[]"


def test_files_are_short() -> None:
    long = {
        str(p.relative_to(ROOT)): n
        for p in sources()
        if (n := len(p.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert not long


def test_functions_are_short() -> None:
    long = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1 - _docstring_lines(node)
                if lines > MAX_FUNCTION_LINES:
                    long.append((str(path.relative_to(ROOT)), node.name, lines))
    assert not long


def test_no_file_reads_the_environment_but_the_command_line() -> None:
    readers = {
        p.relative_to(ROOT).parts[0]
        for p in sources()
        if "os.environ" in p.read_text() or "getenv" in p.read_text()
    }
    assert readers <= {"cluster"}


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    is_doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return (first.end_lineno or 0) - first.lineno + 1 if is_doc else 0
