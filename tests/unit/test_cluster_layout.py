"""Layout: which workers a spec asks for, and whether nodes can hold them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.layout import layout, shortfall
from core.messages import Role
from core.spec import BatchSpec, ClusterSpec, KVSpec, ModelSpec, PoolSpec

pools = st.lists(
    st.builds(PoolSpec, st.sampled_from(list(Role)), st.integers(0, 4)), min_size=1, max_size=4
).filter(lambda ps: sum(p.replicas for p in ps) > 0)


def test_default_is_one_worker_of_each_kind_with_half_the_cores():
    slots = layout(ClusterSpec(), cores=8)

    assert [(s.worker_id, s.role, s.threads) for s in slots] == [
        ("prefill-0", Role.PREFILL, 4),
        ("decode-0", Role.DECODE, 4),
    ]


def test_settings_of_the_spec_win_over_the_machine():
    spec = ClusterSpec(batch=BatchSpec(threads=3), kv=KVSpec(blocks=77))

    assert {(s.threads, s.blocks) for s in layout(spec, cores=64)} == {(3, 77)}


@given(pools, st.integers(1, 64))
def test_every_replica_gets_a_distinct_id_and_all_get_the_same_threads(given_pools, cores):
    slots = layout(ClusterSpec(pools=tuple(given_pools)), cores)

    for role in Role:
        wanted = sum(p.replicas for p in given_pools if p.role is role)
        ids = [s.worker_id for s in slots if s.role is role]
        assert ids == [f"{role}-{i}" for i in range(wanted)]
    (threads,) = {s.threads for s in slots}
    assert threads == 1 or threads * len(slots) <= cores


def test_cores_are_shared_by_all_ranks_and_a_worker_needs_those_of_its_own():
    split = (PoolSpec(Role.PREFILL, 1, 2), PoolSpec(Role.DECODE, 2))

    slots = layout(ClusterSpec(pools=split), cores=12)

    assert [(s.worker_id, s.ranks, s.threads, s.needs["CPU"], s.pool) for s in slots] == [
        ("prefill-0", 2, 3, 6.0, 0),
        ("decode-0", 1, 3, 3.0, 1),
        ("decode-1", 1, 3, 3.0, 1),
    ]


def test_a_gpu_of_its_own_is_asked_for_each_worker_that_must_run_on_one():
    on_gpus = layout(ClusterSpec(model=ModelSpec(device="cuda")), cores=8)
    wherever = layout(ClusterSpec(), cores=8)

    assert [dict(s.needs) for s in on_gpus] == [{"CPU": 4.0, "GPU": 1.0}] * 2
    assert [dict(s.needs) for s in wherever] == [{"CPU": 4.0}] * 2


def test_threads_of_a_worker_are_split_over_its_ranks():
    split = (PoolSpec(Role.PREFILL, 1, 2), PoolSpec(Role.DECODE, 1, 8))

    slots = layout(ClusterSpec(pools=split, batch=BatchSpec(threads=6)), cores=64)

    assert [s.threads for s in slots] == [3, 1]


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        pytest.param([{"CPU": 8.0}], "", id="fits"),
        pytest.param([{"CPU": 1.0}, {"CPU": 8.0}], "", id="fits-one-of-two"),
        pytest.param([], "no node", id="no-nodes"),
        pytest.param([{"CPU": 2.0}, {"CPU": 3.0}], "needs CPU 8, the largest node has 3", id="cpu"),
        pytest.param([{"GPU": 1.0}], "needs CPU 8, the largest node has 0", id="no-cpu-at-all"),
    ],
)
def test_shortfall_names_the_resource_and_the_amounts(nodes, said):
    told = shortfall({"CPU": 8.0}, nodes)

    assert said in told
    assert bool(told) == bool(said)


def test_shortfall_judges_the_node_that_lacks_least():
    told = shortfall({"CPU": 2.0, "GPU": 1.0}, [{}, {"CPU": 4.0}])

    assert told == "needs GPU 1, the largest node has 0"
