"""Ranking of placements."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.ids import Epoch, WorkerId
from core.messages import Role
from router.plan import Demand, Placement, WorkerView, rank

ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "h": Role.HYBRID}


def views(names, draining=()):
    return [
        WorkerView(WorkerId(n), ROLES[n[0]], Epoch(1), draining=n in draining)
        for n in names.split()
    ]


def ranked(names, loads=None, tokens=10, **demand):
    return [
        f"{p.prefill}>{p.decode}{'!' + p.degraded if p.degraded else ''}"
        for p in rank(views(names), loads or {}, Demand(tokens, **demand))
    ]


def test_pairs_by_least_in_flight_tokens():
    loads = {"p0": 50, "p1": 5, "d0": 7, "d1": 90}
    assert ranked("p0 p1 d0 d1", loads) == ["p1>d0", "p0>d0", "p1>d1", "p0>d1"]


def test_tokens_count_not_requests():
    assert ranked("h0 h1", {"h0": 1000, "h1": 999})[0] == "h1>h1"


def test_an_idle_pair_comes_before_a_hybrid_which_takes_both_legs():
    assert ranked("p d h")[0] == "p>d"
    assert ranked("p d h", {"p": 100})[0] == "h>d"
    assert ranked("p d h", {"p": 100, "d": 100})[0] == "h>h"


def test_hybrids_help_either_pool_but_are_not_paired():
    assert set(ranked("h0 h1")) == {"h0>h0", "h1>h1"}
    assert set(ranked("p h")) == {"p>h", "h>h"}
    assert set(ranked("h d")) == {"h>d", "h>h"}


def test_a_missing_role_is_replaced_and_named():
    assert ranked("d0 d1", {"d0": 1}) == ["d1>d1!local_prefill", "d0>d0!local_prefill"]
    assert ranked("p") == ["p>p!local_decode"]


def test_short_prompts_stay_on_a_decode_worker():
    assert ranked("p d0 d1", tokens=7, disagg_min_tokens=8) == ["d0>d0", "d1>d1"]
    assert ranked("p d0", tokens=8, disagg_min_tokens=8) == ["p>d0"]
    assert ranked("p", tokens=7, disagg_min_tokens=8) == ["p>p!local_decode"]


def test_workers_whose_kv_differs_are_not_paired():
    variant = {"p": "float", "d0": "int8", "d1": "float", "h": "int8"}

    def found(names):
        views = [
            WorkerView(WorkerId(n), ROLES[n[0]], Epoch(1), kv_variant=variant[n])
            for n in names.split()
        ]
        return {(p.prefill, p.decode, p.degraded) for p in rank(views, {}, Demand(10))}

    assert found("p d0 d1") == {("p", "d1", "")}
    assert found("p d0") == {("d0", "d0", "incompatible_kv")}
    assert found("h p d0 d1") == {("p", "d1", ""), ("h", "d0", ""), ("h", "h", "")}


def test_turns_rotate_over_ties():
    firsts = {ranked("h0 h1 h2", turn=turn)[0] for turn in range(3)}
    assert firsts == {"h0>h0", "h1>h1", "h2>h2"}


def test_nobody_ready_is_an_empty_list():
    assert rank([], {}, Demand(10)) == []
    assert rank(views("h", draining=["h"]), {}, Demand(10)) == []


fleets = st.lists(
    st.builds(
        WorkerView,
        st.sampled_from([WorkerId(f"w{i}") for i in range(6)]),
        st.sampled_from(Role),
        st.just(Epoch(1)),
        st.booleans(),
    ),
    unique_by=lambda w: w.worker_id,
)
loads = st.dictionaries(st.sampled_from([WorkerId(f"w{i}") for i in range(6)]), st.integers(0, 99))
demands = st.builds(Demand, st.integers(1, 50), st.integers(0, 60), st.integers(0, 10**9))


@settings(max_examples=50, deadline=None)
@given(fleets, loads, demands)
def test_total_and_only_on_ready_workers(workers, load, demand):
    ready = {w.worker_id: w for w in workers if not w.draining}
    found = rank(workers, load, demand)
    assert bool(found) == bool(ready)
    assert len(set(found)) == len(found)
    for placement in found:
        assert {placement.prefill, placement.decode} <= ready.keys()


@settings(max_examples=50, deadline=None)
@given(fleets, loads, demands)
def test_second_choices_only_where_a_role_is_missing(workers, load, demand):
    ready = {w.worker_id: w for w in workers if not w.draining}
    for p in rank(workers, load, demand):
        does_both = ready[p.prefill].role.prefills and ready[p.decode].role.decodes
        short = demand.tokens < demand.disagg_min_tokens
        assert does_both or p.degraded or (short and p.local and ready[p.decode].role.decodes)
        if p.degraded == "local_decode":
            assert not any(w.role.decodes for w in ready.values())
        if p.degraded == "local_prefill":
            assert not any(w.role.prefills for w in ready.values())


@settings(max_examples=50, deadline=None)
@given(fleets, loads, demands, st.randoms())
def test_the_order_of_the_fleet_does_not_matter(workers, load, demand, rng):
    shuffled = list(workers)
    rng.shuffle(shuffled)
    assert rank(shuffled, load, demand) == rank(workers, load, demand)


@settings(max_examples=50, deadline=None)
@given(fleets, loads, demands)
def test_the_first_is_no_busier_than_any_other(workers, load, demand):
    def busiest(p):
        each = 2 if p.local else 1
        return max(load.get(w, 0) for w in (p.prefill, p.decode)) + each * demand.tokens

    costs = [busiest(p) for p in rank(workers, load, demand)]
    assert costs == sorted(costs)


@pytest.mark.parametrize(("prefill", "decode", "local"), [("a", "a", True), ("a", "b", False)])
def test_same_worker_twice_is_local(prefill, decode, local):
    assert Placement(WorkerId(prefill), WorkerId(decode)).local is local
