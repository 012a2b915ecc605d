"""Clusters to measure: `trireme serve` as a user starts it, on free ports of this machine."""

import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cluster import probe
from core.errors import Unavailable

START_S = 120.0
STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    model: str


@contextmanager
def cluster(*flags: str) -> Iterator[Running]:
    """Up when entered, down when left.  Raises RuntimeError with its output when it fails."""
    port = _free_port()
    url = probe.base_url("127.0.0.1", port)
    command = [sys.executable, "-m", "cluster.cli", "serve", "--name", f"bench-{port}"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port), *flags], stdout=output, stderr=subprocess.STDOUT
        )
        try:
            _await_ready(process, url)
            model = str(probe.get_json(f"{url}/v1/models")["data"][0]["id"])
            yield Running(url, model)
        except RuntimeError as error:
            output.seek(0)
            raise RuntimeError(f"{error}\n{output.read()}") from None
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(STOP_S)


def _await_ready(process: "subprocess.Popen[bytes]", url: str) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the cluster ended with status {process.returncode}")
        try:
            probe.get_json(f"{url}/readyz", 5.0)
        except Unavailable:
            time.sleep(0.5)
        else:
            return
    raise RuntimeError(f"not ready within {START_S:g} s")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
