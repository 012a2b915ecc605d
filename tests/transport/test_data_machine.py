"""Random histories of a source and a destination against a model of the destination's memory."""

import secrets

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.ids import LeaseId
from core.ports import MoveState
from tests.transport.data_rig import rig

BLOCKS = 8
ids = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=4, unique=True).map(tuple)


class DataPlane(RuleBasedStateMachine):
    mover = ""

    def __init__(self) -> None:
        super().__init__()
        self.context = rig(self.mover, blocks=BLOCKS)
        self.rig = self.context.__enter__()
        self.link = self.rig.link()
        self.placed: dict[int, int] = {}
        self.lease = LeaseId("none")
        self.targets: tuple[int, ...] = ()
        self.filled: set[int] = set()

    def teardown(self) -> None:
        self.link.close()
        self.context.__exit__(None, None, None)

    @rule(blocks=ids)
    def reserve(self, blocks: tuple[int, ...]) -> None:
        self.lease, self.targets, self.filled = self.rig.landing.reserve(blocks), blocks, set()

    @precondition(lambda self: self.targets)
    @rule()
    def revoke(self) -> None:
        self.rig.landing.revoke(self.lease)
        self.targets = ()

    @rule(sources=ids, first=st.integers(0, 3))
    def push(self, sources: tuple[int, ...], first: int) -> None:
        report = self.link.push(self.rig.ticket(self.lease, sources, first), 20)
        places = range(first, first + len(sources))
        if places.stop > len(self.targets) or self.filled & set(places):
            assert report.state is MoveState.GONE
            return
        assert report.state is MoveState.DONE
        self.filled |= set(places)
        self.placed |= {self.targets[p]: s for p, s in zip(places, sources, strict=True)}

    @rule(source=st.integers(0, BLOCKS - 1))
    def push_a_block_that_changed_hands(self, source: int) -> None:
        old = self.rig.ticket(self.lease, (source,))
        self.rig.source.generations[source] += 1
        assert self.link.push(old, 20).state is MoveState.FAILED

    @rule(action=st.sampled_from(["duplicate", "delay", "reorder"]))
    def inject_what_heals(self, action: str) -> None:
        self.rig.inject(action=action, delay_s=0.001)

    @rule(
        action=st.sampled_from(["truncate", "corrupt"]),
        source=st.integers(0, BLOCKS - 1),
        block=st.integers(0, BLOCKS - 1),
    )
    def lose_a_push_and_repeat_it(self, action: str, source: int, block: int) -> None:
        lease = self.rig.landing.reserve((block,))
        self.rig.inject(action=action)
        assert self.link.push(self.rig.ticket(lease, (source,)), 20).state is MoveState.FAILED
        self.rig.faults.set(())
        if action == "truncate":
            self.link.close()
            self.link = self.rig.link()
        assert self.link.push(self.rig.ticket(lease, (source,)), 20).state is MoveState.DONE
        self.placed[block] = source

    @rule()
    def expel_and_come_back(self) -> None:
        assert self.rig.server.expel("prefill-0")
        assert self.rig.landing.settled()
        report = self.link.push(self.rig.ticket(self.lease, (0,)), 20)
        assert report.state is MoveState.FAILED
        self.rig.key = secrets.token_bytes(32)
        self.rig.server.admit("prefill-0", self.rig.key)
        self.link = self.rig.link()

    @invariant()
    def memory_is_what_was_pushed(self) -> None:
        self.rig.expect(self.placed)


@pytest.mark.parametrize("mover", ["shm", "tcp"])
def test_any_history_leaves_exactly_the_pushed_blocks(mover: str) -> None:
    machine = type("DataPlaneOver", (DataPlane,), {"mover": mover})
    machine.TestCase.settings = settings(
        max_examples=25,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    machine.TestCase("runTest").runTest()
