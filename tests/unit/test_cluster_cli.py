"""The command line without a cluster: light, teaching, and clear about mistakes."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cluster import cli, probe, statefile
from cluster.machine import usable_cores
from core.errors import ConfigError, DeadlineExceeded, Unavailable
from core.messages import Role, WorkerReport
from core.spec import to_mapping
from router.schema_errors import error_body

STATUS = {
    "settings": {"pools": [{"role": "prefill", "replicas": 1}, {"role": "decode", "replicas": 2}]},
    "cluster": "c",
    "model": "tiny",
    "router": {"waiting": 0, "counters": {"retries": 4}},
    "workers": [
        {
            "worker_id": "decode-0",
            "role": "decode",
            "address": "127.0.0.1:5",
            "connected": True,
            "lossy": "weights=int8",
            "report": to_mapping(
                WorkerReport(
                    "decode-0",
                    Role.DECODE,
                    7,
                    total_blocks=98,
                    free_blocks=97,
                    step_ms=3.14159,
                    generated_tokens_total=12345,
                )
            ),
        },
        {
            "worker_id": "prefill-0",
            "role": "prefill",
            "connected": False,
            "lossy": "",
            "report": None,
        },
    ],
}


class Server:
    """A cluster's HTTP side: answers by path, a list of answers one after the other."""

    def __init__(self, answers):
        self.answers = answers
        self.bodies = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                found = outer.answers[self.path]
                status, body = found.pop(0) if len(found) > 1 else found[0]
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

            def do_POST(self):
                length = int(self.headers["Content-Length"])
                outer.bodies.append(json.loads(self.rfile.read(length)))
                self.do_GET()

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._thread.join(10)
        self._http.server_close()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "trireme"


def test_help_and_dry_run_import_neither_ray_nor_torch_nor_yaml():
    code = (
        "import sys; from cluster import cli; assert cli.main(['serve', '--dry-run']) == 0;"
        "print(sorted({'ray', 'torch', 'yaml', 'grpc', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"]], ids=" ".join)
def test_help_teaches_by_example(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)

    assert caught.value.code == 0
    assert "trireme serve --prefill 2 --decode 2" in capsys.readouterr().out


def test_an_unknown_flag_is_named_with_a_suggestion(capsys):
    assert cli.main(["serve", "--kv.blck_size", "4"]) == cli.MISUSED
    assert "--kv.blck_size: unknown argument; did you mean --kv.block_size?" in (
        capsys.readouterr().err
    )


def test_dry_run_shows_every_worker(capsys):
    argv = ["serve", "--dry-run", "--prefill", "2", "--batch.threads", "7", "--kv.blocks", "55"]

    assert cli.main(argv) == 0
    shown = capsys.readouterr().out
    for text in ("prefill-0", "prefill-1", "decode-0", "55", "3 workers, 21 threads"):
        assert text in shown


@pytest.mark.parametrize("command", ["status", "down"])
def test_without_a_cluster_it_says_so(folder, capsys, command):
    assert cli.main([command]) != 0
    assert "no cluster 'trireme' runs" in capsys.readouterr().out


def test_status_shows_workers_with_load_and_what_is_not_zero(folder, capsys):
    with (
        Server({"/status": [(200, STATUS)]}) as server,
        statefile.claim(folder, statefile.Running("c", 1, server.url)),
    ):
        assert cli.main(["status", "--name", "c"]) == 0
    lines = capsys.readouterr().out.splitlines()

    decode, lossy = [line for line in lines if "decode-0" in line]
    (prefill,) = [line for line in lines if "prefill-0" in line]
    for text in ("serving", "97 of 98", " 3.1 ", "12345"):
        assert text in decode
    assert lossy == "decode-0 is lossy: weights=int8"
    assert "unreachable" in prefill
    assert "0" not in prefill.replace("prefill-0", ""), "unknown is not idle"
    assert "router.counters.retries: 4" in lines
    assert "2 of 3 workers; the others are starting" in lines
    assert not any("router.waiting" in line for line in lines)


def test_status_as_json_is_what_the_server_sent(folder, capsys):
    with (
        Server({"/status": [(200, STATUS)]}) as server,
        statefile.claim(folder, statefile.Running("c", 1, server.url)),
    ):
        assert cli.main(["status", "--json", "--name", "c"]) == 0

    assert json.loads(capsys.readouterr().out) == STATUS


def test_status_of_a_server_that_does_not_answer_is_a_clear_failure(folder, capsys):
    with statefile.claim(folder, statefile.Running("c", 1, "http://127.0.0.1:1")):
        assert cli.main(["status", "--name", "c"]) == cli.FAILED

    said = capsys.readouterr().out
    assert "is starting or stopping: http://127.0.0.1:1/status: [Errno 111]" in said


def test_the_probe_asks_again_until_a_token_comes():
    refusal = (503, error_body(Unavailable("no workers")))
    answers = {
        "/v1/models": [refusal, (200, {"data": [{"id": "tiny"}]})],
        "/v1/completions": [refusal, (200, {})],
    }
    with Server(answers) as server:
        assert probe.first_token(server.url, timeout_s=30) == "tiny"

    assert server.bodies[-1]["model"] == "tiny"
    assert server.bodies[-1]["max_tokens"] == 1


def test_the_probe_gives_up_with_the_last_answer():
    answers = {"/v1/models": [(503, error_body(Unavailable("no workers at all")))]}
    with Server(answers) as server, pytest.raises(DeadlineExceeded, match="no workers at all"):
        probe.first_token(server.url, timeout_s=0)


def test_an_answer_that_is_no_json_is_named():
    with (
        Server({"/status": [(200, b"<html>")]}) as server,
        pytest.raises(Unavailable, match="did not answer JSON"),
    ):
        probe.get_json(f"{server.url}/status")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:9"),
        ("0.0.0.0", "http://127.0.0.1:9"),
        ("::", "http://[::1]:9"),
    ],
    ids=str,
)
def test_a_server_on_all_addresses_is_reached_on_loopback(host, url):
    assert probe.base_url(host, 9) == url


def test_a_name_belongs_to_one_cluster_at_a_time(folder):
    mine = statefile.Running("c", 1, "http://a")
    with statefile.claim(folder, mine):
        assert statefile.find(folder, "c") == mine
        assert not statefile.await_end(folder, "c", timeout_s=0)
        with (
            pytest.raises(ConfigError, match="'c' is running"),
            statefile.claim(folder, statefile.Running("c", 2, "http://b")),
        ):
            pass
        assert statefile.find(folder, "c") == mine, "the loser left it alone"
        with statefile.claim(folder, statefile.Running("d", 3, "http://d")):
            assert statefile.find(folder, "d") is not None

    assert statefile.find(folder, "c") is None
    assert statefile.await_end(folder, "c", timeout_s=0)


def test_a_file_left_by_a_crash_means_nothing_runs(folder):
    folder.mkdir()
    (folder / "c.json").write_text(json.dumps({"name": "c", "pid": 1, "url": "http://a"}))

    assert statefile.find(folder, "c") is None
    with statefile.claim(folder, statefile.Running("c", 2, "http://b")):
        assert statefile.find(folder, "c") == statefile.Running("c", 2, "http://b")


def test_a_name_that_is_no_file_name_is_refused(folder):
    with (
        pytest.raises(ConfigError, match="name"),
        statefile.claim(folder, statefile.Running("../c", 1, "")),
    ):
        pass


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        pytest.param("max 100000", None, id="no-quota"),
        pytest.param("100000 100000", 1, id="one-core"),
        pytest.param("50000 100000", 1, id="half-a-core-is-one"),
        pytest.param("99900000 100000", None, id="more-than-there-are"),
    ],
)
def test_cores_are_what_the_container_may_use(tmp_path, quota, cores):
    unlimited = usable_cores(tmp_path / "absent")
    (tmp_path / "cpu.max").write_text(quota)

    assert usable_cores(tmp_path / "cpu.max") == (cores or unlimited)
