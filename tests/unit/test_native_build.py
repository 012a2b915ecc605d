"""Compiling the kernels: once, whoever comes first, and with a clear word where it cannot be."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from engine.native import build as building
from engine.native.build import NativeUnavailable, build, find_compiler
from engine.native.library import Library, open_library
from tests.unit.native_help import library

QUICK = ("-O0",)
ROOT = Path(__file__).parents[2]
BUILD_AND_LOAD = """
import sys, time
from pathlib import Path
from engine.native.library import open_library
print(open_library(Path(sys.argv[1]), ("-O0",)).lanes)
"""
MAPPED = """
import torch
from engine.native.library import open_library
open_library()
print({line.split()[-1] for line in open("/proc/self/maps") if "gomp" in line})
"""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    library()
    return tmp_path / "cache"


def python(code: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_that_start_at_once_compile_once(cache: Path) -> None:
    both = [python(BUILD_AND_LOAD, str(cache)) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [out for out, _ in outputs] == [f"{library().lanes}\n"] * 2, outputs
    built = build(cache, QUICK)
    assert sorted(p.name for p in cache.iterdir()) == sorted(["lock", built.name])
    before = built.stat()
    assert build(cache, QUICK) == built
    assert built.stat() == before


def test_other_flags_make_another_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(building, "_compile", lambda *args: made.append(args[-1]))
    assert build(cache, ()) != build(cache, ("-DLANES=4",))
    assert len(set(made)) == 2


def test_without_a_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler.*no-such-compiler.*install"):
        open_library(cache)


def test_a_compilation_that_fails_says_why_and_leaves_nothing(cache: Path) -> None:
    with pytest.raises(NativeUnavailable, match=r"failed: .*nonsense"):
        build(cache, ("-DLANES=nonsense", "-fmax-errors=1"))
    assert [p.name for p in cache.iterdir()] == ["lock"]


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    cache.write_text("a file, not a folder")
    with pytest.raises(NativeUnavailable, match=r"cannot use the cache folder .*cache"):
        build(cache)


def test_waiting_for_another_process_has_an_end(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir()
    monkeypatch.setattr(building, "LOCK_S", 0.2)
    with (cache / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(NativeUnavailable, match="another process has held"):
            build(cache, QUICK)


def test_a_compiler_that_hangs_is_given_up(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = cache.parent / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(building, "COMPILERS", (str(slow),))
    monkeypatch.setattr(building, "COMPILE_S", 0.2)
    with pytest.raises(NativeUnavailable, match=r"not done after 0\.2 s"):
        build(cache)


def test_a_library_that_does_not_load(cache: Path) -> None:
    broken = cache.with_suffix(".so")
    broken.write_bytes(b"not a library")
    with pytest.raises(NativeUnavailable, match="cannot load"):
        Library(broken)


def test_torch_and_the_kernels_share_their_threads() -> None:
    """Two OpenMP runtimes in a process would fight for the cores."""
    library()
    out, errors = python(MAPPED).communicate(timeout=120)
    assert out.count("gomp") == 1, (out, errors)


def test_the_compiler_is_found_by_name() -> None:
    library()
    assert Path(find_compiler()).is_file()
