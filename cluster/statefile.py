"""One file per running cluster of this user: how `status` and `down` find it.

The serving process holds a lock on its file as long as it lives, so the lock alone says whether
a cluster runs: a file left by a crash is recognised, and a process id that was given to somebody
else meanwhile is never signalled.
"""

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.names import hint
from core.errors import ConfigError, Stage

POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Running:
    """A cluster that lives: the process that serves it, and where it is reached."""

    name: str
    pid: int
    url: str


@contextmanager
def claim(folder: Path, running: Running) -> Iterator[None]:
    """Hold the name for this process.  Raises ConfigError when another cluster has it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = _path(folder, running.name)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"name: a cluster {running.name!r} is running; "
                f"stop it with `{hint('down', running.name)}`, or give this one another --name "
                "and --port",
                stage=Stage.START,
                field="name",
            ) from None
        os.truncate(file, 0)
        os.write(file, json.dumps(asdict(running)).encode())
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(file)


def find(folder: Path, name: str) -> Running | None:
    """The running cluster of that name, or None."""
    try:
        file = os.open(_path(folder, name), os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None  # nobody holds it: left by a crash
    except BlockingIOError:
        return Running(**json.loads(os.read(file, 1 << 16)))
    finally:
        os.close(file)


def names(folder: Path) -> list[str]:
    """The clusters that run, by name."""
    found = sorted(path.stem for path in folder.glob("*.json"))
    return [name for name in found if find(folder, name) is not None]


def await_end(folder: Path, name: str, timeout_s: float) -> bool:
    """Wait until no cluster of that name runs; whether that came in time."""
    end = time.monotonic() + timeout_s
    while find(folder, name) is not None:
        if time.monotonic() >= end:
            return False
        time.sleep(POLL_S)
    return True


def _path(folder: Path, name: str) -> Path:
    if not re.fullmatch(r"[\w-][\w.-]*", name):
        raise ConfigError(
            f"name: {name!r} has more than letters, digits, '.', '_' and '-'",
            stage=Stage.START,
            field="name",
        )
    return folder / f"{name}.json"
