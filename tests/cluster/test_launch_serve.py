"""`trireme serve`, `status` and `down` as a user runs them: processes, exit codes, words."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

from cluster import statefile
from tests.cluster.launch_processes import alive, children, listeners, until

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


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_serve_answers_status_tells_and_down_leaves_nothing(tmp_path):
    port = free_port()
    with Serving(tmp_path, "--name", "e2e", "--port", str(port), "--kv.memory_mb", "64") as serving:
        until(lambda: serving.says("Ctrl-C stops it"), START_S)
        said = serving.output.read_text()
        for step in ("model", "ray", "supervisor", "prefill-0", "decode-0", "serve", "first token"):
            assert any(line.startswith(step) for line in said.splitlines()), step
        assert f"curl http://127.0.0.1:{port}/v1/chat/completions" in said

        pids = serving.look()
        addresses = listeners(pids | {serving.process.pid})
        assert ("127.0.0.1", port) in addresses
        assert {address for address, _ in addresses} <= {"127.0.0.1", "::1"}

        (model,) = json.load(
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=60)
        )["data"]
        answer = post(
            f"http://127.0.0.1:{port}/v1/completions",
            {"model": model["id"], "prompt": "The sea", "max_tokens": 3, "temperature": 0},
        )
        assert answer["usage"]["completion_tokens"] == 3

        code, said = run(tmp_path, "status", "--name", "e2e")
        assert code == 0
        assert "prefill-0" in said
        assert "decode-0" in said

        code, said = run(tmp_path, "serve", "--name", "e2e", "--port", str(free_port()))
        assert (code, "'e2e' is running" in said) == (2, True), said
        code, said = run(tmp_path, "serve", "--name", "other", "--port", str(port))
        assert (code, f"cannot listen on 127.0.0.1:{port}" in said) == (2, True), said

        assert run(tmp_path, "down", "--name", "e2e") == (0, "e2e is down")

        assert serving.process.wait(STOP_S) == 0
        until(lambda: not any(alive(pid) for pid in pids), STOP_S)
        assert serving.output.read_text().rstrip().endswith("stopped")
        assert run(tmp_path, "down", "--name", "e2e")[0] != 0


def test_interrupted_while_it_starts_it_leaves_nothing(tmp_path):
    with Serving(tmp_path, "--name", "early", "--port", str(free_port())) as serving:
        until(lambda: serving.says("supervisor"), START_S)

        os.kill(serving.process.pid, signal.SIGINT)

        assert serving.process.wait(STOP_S) == 0, serving.output.read_text()
        until(lambda: not any(alive(pid) for pid in serving.seen), STOP_S)
        assert statefile.find(tmp_path / "trireme", "early") is None


def test_a_model_that_is_not_there_is_told_before_anything_starts(tmp_path):
    code, said = run(tmp_path, "serve", "--model", "no/such/model", "--port", str(free_port()))

    assert code == 2
    assert "model.ref 'no/such/model'" in said
    assert "ray" not in said
    assert statefile.find(tmp_path / "trireme", "trireme") is None
