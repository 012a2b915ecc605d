"""`trireme doctor` on a cluster whose answers are not those of the plain loop."""

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster import doctor
from engine.reference import greedy
from tests.rig.tiny import decoder, tiny_model

BLOCK = 16


class Cluster:
    """What a doctor sees of a cluster of one worker: int8 weights, admitted or not."""

    def __init__(self, model: Path, lossy: str) -> None:
        self._model = decoder(model, "int8")
        self._seen: set[tuple[int, ...]] = set()
        worker = {"worker_id": "hybrid-0", "lossy": lossy, "connected": True, "report": None}
        self.status = {
            "model": "tiny",
            "max_model_len": 600,
            "settings": {
                "model": {"ref": str(model), "device": "cpu", "dtype": "float32"},
                "kv": {"block_size": BLOCK},
                "pools": [{"replicas": 1}],
            },
            "router": {"counters": {"retries": {}, "degraded": {}}},
            "workers": [worker],
        }

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = tuple(body["prompt"])
        steps = greedy(self._model, self._model.config, prompt, body["max_tokens"], ())
        cached = (len(prompt) - 1) // BLOCK * BLOCK if prompt in self._seen else 0
        self._seen.add(prompt)
        trace = {
            "prefill_worker": "hybrid-0",
            "decode_worker": "hybrid-0",
            "moved_bytes": 0,
            "mover": "",
            "cached_tokens": cached,
            "degraded": [],
        }
        return {"choices": [{"token_ids": [step.token for step in steps], "trireme": trace}]}


@contextmanager
def served(cluster: Cluster) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(cluster.status if self.path == "/status" else {"ready": True})

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            self.answer(cluster.complete(json.loads(self.rfile.read(length))))

        def answer(self, body: object) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        thread.join(10)
        http.server_close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def examine(model: Path, folder: Path, lossy: str) -> tuple[int, str]:
    out = io.StringIO()
    with served(Cluster(model, lossy)) as url:
        code = doctor.run(folder, "none", url, Console(file=out, width=200))
    return code, out.getvalue()


def test_other_tokens_of_lossy_workers_are_remarked(tiny: Path, tmp_path: Path) -> None:
    code, said = examine(tiny, tmp_path, "weights=int8")
    assert code == 0
    assert "note: hybrid-0 is lossy: weights=int8; its answers may differ" in said
    assert "the plain loop has" in said
    assert "PROBLEM" not in said


def test_other_tokens_of_other_workers_are_a_problem(tiny: Path, tmp_path: Path) -> None:
    code, said = examine(tiny, tmp_path, "")
    assert code == 1
    assert "do not trust this cluster" in said
