"""Compiling the kernels on the machine that runs them, once per compiler, processor and source.

GCC or Clang is asked for the whole instruction set of this processor (`-march=native`), so a
compiled library is never shipped; it lies in the user's cache and is rebuilt when anything that
matters changes.
"""

import fcntl
import logging
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
COMPILERS = ("g++", "clang++", "c++")
FLAGS = (
    *("-std=gnu++17", "-O3", "-march=native", "-ffp-contract=fast"),
    *("-fopenmp", "-fPIC", "-shared", "-fvisibility-inlines-hidden"),
)
COMPILE_S = 120.0
LOCK_S = 180.0
"""Waiting for another process that compiles."""
_POLL_S = 0.05


class NativeUnavailable(Exception):
    """The kernels cannot be had here; says why.  Plain torch computes the same, more slowly."""


def build(cache: Path | None = None, extra: Sequence[str] = ()) -> Path:
    """The library, compiled if need be; safe to call from several processes at once.

    cache: folder to keep it in; None: the user's own.  extra: flags after the usual ones.
    Raises NativeUnavailable.
    """
    cache = cache or Path.home() / ".cache" / "trireme" / "native"
    compiler = find_compiler()
    flags = (*FLAGS, *extra)
    target = cache / f"{_digest(compiler, flags)}.so"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _only_builder(cache / "lock"):
            if not target.exists():
                _compile(compiler, flags, target)
    except OSError as error:
        raise NativeUnavailable(f"cannot use the cache folder {cache} ({error})") from error
    return target


def find_compiler() -> str:
    """Path of the first compiler there is.  Raises NativeUnavailable."""
    found = [path for name in COMPILERS if (path := shutil.which(name))]
    if not found:
        raise NativeUnavailable(f"no C++ compiler ({', '.join(COMPILERS)}); install g++")
    return found[0]


def _digest(compiler: str, flags: Sequence[str]) -> str:
    """Of all that decides what comes out: the macros that the compiler predefines tell its
    version and the processor's instruction set."""
    macros = _run([compiler, *flags, "-dM", "-E", "-x", "c++", "-"])
    digest = blake2b(repr((flags, macros)).encode(), digest_size=12)
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()


def _compile(compiler: str, flags: Sequence[str], target: Path) -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        _run([compiler, *flags, *map(str, sorted(SOURCES.glob("*.cpp"))), "-o", str(made)])
        made.replace(target)
    log.info("compiled the CPU kernels with %s in %.1f s", compiler, time.monotonic() - began)


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMPILE_S
        )
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"{command[0]} was not done after {COMPILE_S:g} s") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise NativeUnavailable(f"{command[0]} failed: {'; '.join(errors[:3]) or done.stderr}")
    return done.stdout


@contextmanager
def _only_builder(path: Path) -> Iterator[None]:
    """Holds a lock that ends with the process, however it ends."""
    end = time.monotonic() + LOCK_S
    with path.open("w") as file:
        while not _try_lock(file.fileno()):
            if time.monotonic() > end:
                raise NativeUnavailable(
                    f"another process has held {path} for {LOCK_S:g} s; end it or remove it"
                )
            time.sleep(_POLL_S)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
