"""The supervisor on a real Ray: deaths, its own death, shortages, and an orderly end.

One Ray for all tests; each has a cluster of its own in it, as separate names must allow.
"""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from cluster import launcher
from cluster.layout import layout
from cluster.names import worker_name
from core.errors import ConfigError, ModelUnsupported, Unavailable, WorkerLost
from core.messages import Role
from core.spec import (
    BatchSpec,
    ClusterSpec,
    FaultSpec,
    KVSpec,
    ModelSpec,
    PoolSpec,
    TimeoutSpec,
)
from core.states import WorkerState
from tests.rig.processes import alive, children, listeners, until
from tests.rig.tiny import tiny_model

PROGRAM = "tests.cluster.launch_fake_worker:FakeWorker"
ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
PAIR = (PoolSpec(Role.PREFILL, 1), PoolSpec(Role.DECODE, 1))
ONE = (PoolSpec(Role.HYBRID, 1),)


@pytest.fixture(scope="module")
def ray_runs():
    """Room for two pairs of workers, counting Ray's double room for replacements."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)  # where worker processes find PROGRAM
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        launcher.start_ray(layout(ClusterSpec(pools=PAIR * 2), cores=1), cores=1)
        yield
    finally:
        launcher.stop(None, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class Cluster:
    """A supervisor of fake workers, or of real ones: then `behaviour` is the model."""

    def __init__(self, name, pools=PAIR, behaviour="ok", threads=0, program=PROGRAM, **timeouts):
        limits = TimeoutSpec(**({"start_s": WAIT_S} | timeouts))
        self.spec = ClusterSpec(
            name,
            ModelSpec(ref=behaviour),
            pools=pools,
            kv=KVSpec(blocks=16),
            batch=BatchSpec(threads=threads),
            timeouts=limits,
        )
        self.supervisor = launcher.start_supervisor(self.spec, layout(self.spec, 1), program)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        import ray

        self.call("shutdown", 0.0)
        ray.kill(self.supervisor)

    def call(self, method, *args):
        """A call that outlives one restart of the supervisor."""
        for _ in range(100):
            try:
                ref = getattr(self.supervisor, method).remote(*args)
                return launcher.fetch(ref, WAIT_S, "supervisor")
            except WorkerLost:
                until(self.answers, WAIT_S)
        raise AssertionError("the supervisor keeps dying")

    def answers(self):
        try:
            return launcher.fetch(self.supervisor.status.remote(), WAIT_S, "supervisor")
        except WorkerLost:
            return None

    def workers(self):
        return {w.worker_id: w for w in self.call("status").workers}

    def ready(self, *, without=None):
        """The workers, once all are ready and none of them is the process `without`."""

        def look():
            status = self.call("status")
            replaced = without not in {w.pid for w in status.workers}
            return status.ready and replaced and {w.worker_id: w for w in status.workers}

        return until(look, WAIT_S)

    def counter(self, worker, name):
        """What the fake worker counts, asked from the actor itself."""
        import ray

        actor = ray.get_actor(worker_name(self.spec.name, worker.worker_id, worker.epoch))
        report = launcher.fetch(actor.report.remote(), WAIT_S, worker.worker_id)
        return {c.name: c.value for c in report.counters}[name]


def test_everything_listens_on_loopback_only(ray_runs):
    with Cluster("loopback") as cluster:
        pids = children(os.getpid())
        assert {w.pid for w in cluster.ready().values()} <= children(os.getpid())
        found = listeners({os.getpid()} | pids | children(os.getpid()))

    assert len(found) > 5, "Ray listens on several ports; fewer means that we looked wrongly"
    assert {address for address, _ in found} <= {"127.0.0.1", "::1"}


def test_a_killed_worker_is_replaced_by_a_larger_epoch_and_everybody_is_told(ray_runs):
    with Cluster("killed") as cluster:
        before = cluster.ready()
        version, peers = cluster.call("watch", 0, 1.0)
        assert {p.worker_id for p in peers} == set(before)

        os.kill(before["decode-0"].pid, signal.SIGKILL)

        after = cluster.ready(without=before["decode-0"].pid)
        assert after["decode-0"].epoch > before["decode-0"].epoch
        assert after["prefill-0"].epoch == before["prefill-0"].epoch
        assert after["decode-0"].fault.code == "worker_lost"
        newer, told = cluster.call("watch", version, WAIT_S)
        assert newer > version
        assert {(p.worker_id, p.epoch) for p in told} == {
            (w.worker_id, w.epoch) for w in after.values()
        }
        until(
            lambda: cluster.counter(after["prefill-0"], "newest_peer") == after["decode-0"].epoch,
            WAIT_S,
        )
        assert cluster.counter(after["prefill-0"], "peers") == 1


def test_a_silent_worker_counts_as_dead(ray_runs):
    with Cluster("silent", ONE, token_s=1.0) as cluster:
        (before,) = cluster.ready().values()

        os.kill(before.pid, signal.SIGSTOP)

        (after,) = cluster.ready(without=before.pid).values()
        assert after.fault.code == "deadline_exceeded"
        until(lambda: not alive(before.pid), WAIT_S)


def test_a_lost_rank_is_replaced_together_with_its_whole_worker(ray_runs, tmp_path):
    pools, model = (PoolSpec(Role.HYBRID, tensor_parallel=2),), str(tiny_model(tmp_path))
    with Cluster("gang", pools, model, program="actors.worker:WorkerProcess") as cluster:
        (before,) = cluster.ready().values()
        leader, other = before.rank_pids
        assert leader == before.pid
        assert {leader, other} <= children(os.getpid())

        os.kill(other, signal.SIGKILL)

        (after,) = cluster.ready(without=leader).values()
        assert after.epoch > before.epoch
        assert after.fault.code == "worker_lost"
        assert not alive(leader)
        assert not {leader, other} & set(after.rank_pids)

    until(lambda: not any(map(alive, after.rank_pids)), WAIT_S)


def test_a_killed_supervisor_finds_its_workers_again(ray_runs):
    with Cluster("adopting") as cluster:
        before = cluster.ready()
        version, _ = cluster.call("watch", 0, 1.0)

        os.kill(cluster.call("status").pid, signal.SIGKILL)

        newer, peers = until(
            lambda: (found := cluster.call("watch", version, 5.0))[0] != version and found, WAIT_S
        )
        assert newer > version, "who follows membership sees that it was looked at anew"
        assert {(p.worker_id, p.epoch) for p in peers} == {
            (w.worker_id, w.epoch) for w in before.values()
        }, "not one moment with fewer workers than there are"
        assert {w.pid for w in cluster.ready().values()} == {w.pid for w in before.values()}

        os.kill(before["decode-0"].pid, signal.SIGKILL)

        after = cluster.ready(without=before["decode-0"].pid)
        assert after["decode-0"].epoch > before["decode-0"].epoch


def test_a_worker_no_node_could_hold_is_refused_by_name_and_amount(ray_runs):
    with Cluster("impossible", ONE, threads=1000) as cluster:
        fault = until(lambda: cluster.workers()["hybrid-0"].fault, WAIT_S)

    error = fault.error()
    assert isinstance(error, ConfigError)
    assert (error.worker, error.field) == ("hybrid-0", "batch.threads")
    assert "needs CPU 1000, the largest node has 8" in error.message


def test_a_worker_that_finds_no_room_says_what_is_missing(ray_runs):
    with Cluster("crowded", (PoolSpec(Role.HYBRID, 2),), threads=7, start_s=3.0) as cluster:
        fault = until(lambda: [w.fault for w in cluster.workers().values() if w.fault], WAIT_S)[0]

    error = fault.error()
    assert isinstance(error, Unavailable)
    assert error.worker.startswith("hybrid-")
    assert "needs CPU 7" in error.message


def test_an_error_of_the_worker_keeps_its_type(ray_runs):
    with Cluster("unsupported", ONE, behaviour="unsupported") as cluster:
        fault = until(lambda: cluster.workers()["hybrid-0"].fault, WAIT_S)

    assert isinstance(fault.error(), ModelUnsupported)
    assert fault.message == "no such architecture"


def test_a_worker_that_dies_at_once_is_tried_again_and_counted(ray_runs):
    with Cluster("crashing", ONE, behaviour="crash") as cluster:
        worker = until(lambda: (w := cluster.workers()["hybrid-0"]).failures >= 2 and w, WAIT_S)

    assert worker.fault.code == "worker_lost"
    assert worker.state is not WorkerState.READY


def test_faults_and_audits_reach_the_workers_they_are_for(ray_runs):
    rules = (FaultSpec(), FaultSpec(action="delay"))
    with Cluster("faults") as cluster:
        workers = cluster.ready()

        assert cluster.call("set_faults", "decode-0", rules) == ("decode-0",)

        assert cluster.counter(workers["decode-0"], "faults") == 2
        assert cluster.counter(workers["prefill-0"], "faults") == 0
        assert set(cluster.call("set_faults", None, ())) == set(workers)
        assert cluster.counter(workers["decode-0"], "faults") == 0
        assert cluster.call("audit") == {"decode-0": "", "prefill-0": ""}
        with pytest.raises(Unavailable, match=r"ready: .*decode-0"):
            cluster.call("set_faults", "decode-7", rules)


def test_shutdown_leaves_no_process(ray_runs):
    with Cluster("ending") as cluster:
        pids = {w.pid for w in cluster.ready().values()}

        assert cluster.call("shutdown", 1.0) is True

        until(lambda: not any(alive(pid) for pid in pids), WAIT_S)
        assert {w.state for w in cluster.workers().values()} == {WorkerState.DEAD}
        _, peers = cluster.call("watch", 0, 0.0)
        assert peers is None, "closing"


def test_one_cluster_does_not_touch_the_workers_of_another(ray_runs):
    with Cluster("left", ONE) as left, Cluster("right", ONE) as right:
        (kept,) = left.ready().values()
        right.ready()

        assert right.call("shutdown", 0.0) is True

        assert left.workers()["hybrid-0"] == replace(kept, failures=0)
        assert alive(kept.pid)
