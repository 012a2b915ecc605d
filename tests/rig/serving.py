"""`trireme` commands as a user runs them, in the background and to their end."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.rig.processes import alive, children

ROOT = Path(__file__).parents[2]
START_S = 150.0
STOP_S = 60.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def command(folder: Path, *argv: str, **options: object) -> subprocess.Popen:
    """`trireme` with its state in `folder` and its words in `folder`/out, in a session of its
    own as a terminal would give it."""
    return subprocess.Popen(
        [sys.executable, "-m", "cluster.cli", *argv],
        cwd=ROOT,
        env=os.environ | {"XDG_RUNTIME_DIR": str(folder)},
        start_new_session=True,
        text=True,
        **options,
    )


def run(folder: Path, *argv: str) -> tuple[int, str]:
    """Exit status, and both outputs, of a command that ends by itself."""
    process = command(folder, *argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out, _ = process.communicate(timeout=STOP_S)
    return process.returncode, " ".join(out.split())


class Serving:
    """A `trireme serve` in the background; whatever happens, nothing of it is left."""

    def __init__(self, folder: Path, *argv: str) -> None:
        self.output = folder / "out"
        self.seen: set[int] = set()
        with self.output.open("w") as out:
            self.process = command(folder, "serve", *argv, stdout=out, stderr=out)

    def __enter__(self) -> "Serving":
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.look() | {self.process.pid}:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(STOP_S)

    def look(self) -> set[int]:
        """Every process that was ever seen below it."""
        self.seen |= children(self.process.pid)
        return self.seen

    def says(self, text: str) -> bool:
        self.look()
        assert self.process.poll() is None, self.output.read_text()
        return text in self.output.read_text()
