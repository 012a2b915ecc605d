"""`trireme serve` that does not get far: interrupted, or told nonsense."""

import os
import signal

from cluster import statefile
from tests.rig.processes import alive, until
from tests.rig.serving import START_S, STOP_S, Serving, free_port, run
from tests.rig.tiny import tiny_model


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


def test_ranks_that_a_model_cannot_be_split_into_are_told_before_anything_starts(tmp_path):
    model, port = str(tiny_model(tmp_path / "model")), str(free_port())
    code, said = run(tmp_path, "serve", "--model", model, "--port", port, "--tensor-parallel", "3")

    assert code == 2
    assert "pools[0].tensor_parallel: model cannot be split into 3 ranks" in said
    assert "sizes that work: 1, 2" in said
    assert "supervisor" not in said
