"""`trireme serve` that does not get far: interrupted, or told nonsense."""

import os
import signal

from cluster import statefile
from tests.rig.processes import alive, until
from tests.rig.serving import START_S, STOP_S, Serving, free_port, run


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
