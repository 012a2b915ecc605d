"""Planning: one living incarnation per slot, the newest, whatever happens in which order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.layout import WorkerSlot
from cluster.membership import STABLE_S, Membership
from cluster.names import parse_worker, supervisor_name, worker_name
from cluster.plan import MAX_DELAY_S, Start, Stop, due, idle_s, plan
from core.errors import InternalError, WorkerLost
from core.ids import Epoch, WorkerId
from core.messages import Fault, Role, WorkerInfo
from core.states import WorkerState

FAULT = Fault.of(WorkerLost("gone"))


def slot(worker_id: str) -> WorkerSlot:
    return WorkerSlot(WorkerId(worker_id), Role.DECODE, 1, 0)


def info(worker_id: str, epoch: int) -> WorkerInfo:
    return WorkerInfo(WorkerId(worker_id), Role.DECODE, Epoch(epoch), f"127.0.0.1:{epoch}")


def test_an_empty_cluster_starts_every_slot():
    actions = plan([slot("a"), slot("b")], Membership(), now=0.0, wall_ns=7)

    assert actions == (Start(slot("a"), Epoch(7)), Start(slot("b"), Epoch(7)))


def test_nothing_is_done_twice():
    members = Membership()
    members.started(WorkerId("a"), Epoch(1), 0.0)

    assert plan([slot("a")], members, 99.0, 99) == ()
    assert idle_s([slot("a")], members, 99.0) is None


def test_strangers_and_older_doubles_are_stopped():
    members = Membership()
    for worker_id, epoch in (("a", 1), ("a", 3), ("a", 2), ("x", 9)):
        members.started(WorkerId(worker_id), Epoch(epoch), 0.0)

    actions = plan([slot("a")], members, 0.0, 10)

    assert set(actions) == {Stop("a", 1), Stop("a", 2), Stop("x", 9)}


def test_a_draining_worker_is_not_stopped_again():
    members = Membership()
    members.started(WorkerId("a"), Epoch(1), 0.0)
    members.registered(info("a", 1), 0.0)
    assert plan([], members, 0.0, 2) == (Stop("a", 1),)

    members.draining(WorkerId("a"), Epoch(1), 0.0)

    assert plan([], members, 0.0, 2) == ()
    assert members.peers == (info("a", 1),), "its streams still run"


def test_epoch_grows_although_the_wall_clock_goes_back():
    members = Membership()
    members.started(WorkerId("a"), Epoch(1000), 0.0)
    members.died(WorkerId("a"), Epoch(1000), FAULT, 0.0)

    assert plan([slot("a")], members, 0.0, wall_ns=10) == (Start(slot("a"), Epoch(1001)),)


def test_first_restart_is_immediate_and_then_waits_double_up_to_ten_seconds():
    members, now, waits = Membership(), 0.0, []
    for epoch in range(1, 10):
        members.started(WorkerId("a"), Epoch(epoch), now)
        members.died(WorkerId("a"), Epoch(epoch), FAULT, now)
        wait = idle_s([slot("a")], members, now)
        assert wait is not None
        if wait > 0:
            assert plan([slot("a")], members, now + wait * 0.99, 99) == ()
        now += wait
        assert len(plan([slot("a")], members, now, 99)) == 1
        waits.append(wait)

    assert waits == [0, 0.5, 1, 2, 4, 8, 10, 10, 10]


@pytest.mark.parametrize(
    ("registers", "lives_s", "failures"),
    [
        pytest.param(True, STABLE_S, 1, id="ready-and-stable-forgives"),
        pytest.param(True, STABLE_S - 0.1, 3, id="ready-for-a-moment-does-not"),
        pytest.param(False, 10 * STABLE_S, 3, id="slow-failing-start-does-not"),
    ],
)
def test_only_a_worker_that_lived_resets_the_back_off(registers, lives_s, failures):
    members = Membership()
    for epoch in (1, 2):
        members.started(WorkerId("a"), Epoch(epoch), 0.0)
        members.died(WorkerId("a"), Epoch(epoch), FAULT, 0.0)

    members.started(WorkerId("a"), Epoch(3), 0.0)
    if registers:
        members.registered(info("a", 3), 0.0)
    members.died(WorkerId("a"), Epoch(3), FAULT, lives_s)

    history = members.history(WorkerId("a"))
    assert history is not None
    assert history.failures == failures


def test_registering_twice_is_a_broken_invariant():
    members = Membership()
    members.started(WorkerId("a"), Epoch(1), 0.0)
    members.registered(info("a", 1), 0.0)

    with pytest.raises(InternalError, match="illegal transition"):
        members.registered(info("a", 1), 0.0)


def test_news_of_an_unknown_incarnation_changes_nothing():
    members = Membership(version=5)

    members.registered(info("a", 1), 0.0)
    members.died(WorkerId("a"), Epoch(1), FAULT, 0.0)

    assert (members.peers, members.version, members.history(WorkerId("a"))) == ((), 5, None)


@pytest.mark.parametrize(
    "name",
    ["trireme/c/supervisor", "trireme/other/a/1", "trireme/c/a/x", "else/c/a/1", "a", ""],
    ids=str,
)
def test_names_that_are_no_worker_of_ours(name):
    assert parse_worker("c", name) is None


def test_worker_names_come_back_whole():
    assert parse_worker("c", worker_name("c", WorkerId("a-0"), Epoch(12))) == ("a-0", 12)
    assert parse_worker("c", supervisor_name("c")) is None


class Cluster(RuleBasedStateMachine):
    """The supervisor's duty played by hand: `act` executes the plan, everything else happens."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = [slot("a"), slot("b")]
        self.members = Membership()
        self.now = 0.0
        self.epochs: dict[str, list[int]] = {"a": [], "b": [], "x": []}
        self.seen = (self.members.version, self.members.peers)

    @rule()
    def act(self) -> None:
        for action in plan(self.slots, self.members, self.now, wall_ns=1):
            if isinstance(action, Start):
                worker_id = action.slot.worker_id
                assert action.epoch > max(self.epochs[worker_id], default=0)
                self.epochs[worker_id].append(action.epoch)
                self.members.started(worker_id, action.epoch, self.now)
            else:
                self.members.died(action.worker_id, action.epoch, FAULT, self.now)
        for worker_id in ("a", "b"):
            assert sum(m.worker_id == worker_id for m in self.members) <= 1
        assert not any(m.worker_id == "x" for m in self.members)

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(worker_id=st.sampled_from(["a", "b", "x"]))
    def find_another(self, worker_id: str) -> None:
        """What adoption does: an incarnation turns up that was not planned."""
        epoch = max(self.epochs[worker_id], default=0) + 1
        self.epochs[worker_id].append(epoch)
        self.members.started(WorkerId(worker_id), Epoch(epoch), self.now)

    @precondition(lambda self: any(m.state is WorkerState.STARTING for m in self.members))
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        starting = [m for m in self.members if m.state is WorkerState.STARTING]
        member = data.draw(st.sampled_from(starting))
        self.members.registered(info(member.worker_id, member.epoch), self.now)

    @rule(worker_id=st.sampled_from(["a", "b", "x"]), epoch=st.integers(1, 5))
    def die(self, worker_id: str, epoch: int) -> None:
        """Also of incarnations that never were, or died long ago."""
        self.members.died(WorkerId(worker_id), Epoch(epoch), FAULT, self.now)

    @rule()
    def settle(self) -> None:
        """Within the longest back-off every slot has its worker again."""
        self.now += MAX_DELAY_S
        self.act()
        assert {m.worker_id for m in self.members} == {"a", "b"}
        assert idle_s(self.slots, self.members, self.now) is None

    @invariant()
    def peers_are_the_ready_ones_and_versions_tell(self) -> None:
        ready = {(m.worker_id, m.epoch) for m in self.members if m.state is WorkerState.READY}
        assert {(p.worker_id, p.epoch) for p in self.members.peers} == ready
        version, peers = self.seen
        assert (self.members.version > version) == (self.members.peers != peers)
        self.seen = (self.members.version, self.members.peers)

    @invariant()
    def no_back_off_exceeds_the_longest(self) -> None:
        for s in self.slots:
            assert due(self.members.history(s.worker_id)) <= self.now + MAX_DELAY_S


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
