"""LeaseTable under every order of writes, ends, renewals and expiry."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.errors import InternalError, LeaseGone
from core.ids import BlockHash, BlockId, Epoch, LeaseId
from core.messages import Reserve
from engine.policy.blocks import BlockPool
from engine.policy.chain import PrefixChain
from engine.policy.leases import Lease, LeaseTable
from engine.policy.totals import Totals
from tests.property.paged_model import key

TOTAL, EPOCH, LEASE_S = 10, Epoch(3), 5.0
CACHED = [BlockHash(b"0"), BlockHash(b"1")]


@dataclass
class Expected:
    """What the model knows of one lease."""

    lease: Lease
    landed: set[int]
    deadline: float
    ended: bool = False
    writing: list[tuple[int, int]] = field(default_factory=list)

    def overdue(self, now: float) -> bool:
        return not self.ended and not self.writing and self.deadline < now

    def open_for(self, first: int, count: int) -> bool:
        span = set(range(first, first + count))
        busy = {p for f, c in self.writing for p in range(f, f + c)}
        inside = first >= 0 and count >= 1 and first + count <= len(self.lease.places)
        return not self.ended and inside and not span & (busy | self.landed)


class LeaseTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = BlockPool(TOTAL)
        self.totals = Totals()
        self.table = LeaseTable(self.pool, EPOCH, LEASE_S, self.totals)
        self.leases: list[Expected] = []
        self.attached: list[tuple[BlockId, ...]] = []
        self.serial = 0

    @initialize()
    def cache_two_blocks(self) -> None:
        fresh = self.pool.allocate(2)
        assert fresh is not None
        for block, block_hash in zip(fresh, CACHED, strict=True):
            self.pool.publish(block, block_hash)
        self.pool.release(fresh)

    def under_write(self) -> set[BlockId]:
        ids = set()
        for known in self.leases:
            for first, count in known.writing:
                ids.update(known.lease.claim.block_ids[first : first + count])
        return ids

    @rule(match=st.integers(0, 2), extra=st.integers(0, 3))
    def open(self, match: int, extra: int) -> None:
        claim = self.pool.claim(CACHED[:match], match + extra, headroom=0)
        if claim is None:
            return
        assert not set(claim.block_ids) & self.under_write()
        self.serial += 1
        ask = Reserve(key(f"r{self.serial}"), (1,))
        chain = PrefixChain(BlockHash(b""), 4)
        lease = self.table.open(ask, "owner", chain, claim, self.now)
        self.leases.append(Expected(lease, set(range(claim.present)), self.now + LEASE_S))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), first=st.integers(-1, 5), count=st.integers(0, 4))
    def begin(self, data: st.DataObject, first: int, count: int) -> None:
        known = data.draw(st.sampled_from(self.leases))
        lease_id = known.lease.lease_id
        if known.overdue(self.now) or not known.open_for(first, count):
            with pytest.raises(LeaseGone):
                self.table.begin(lease_id, EPOCH, first, count, self.now)
            return
        with pytest.raises(LeaseGone):
            self.table.begin(lease_id, Epoch(EPOCH - 1), first, count, self.now)
        ids = self.table.begin(lease_id, EPOCH, first, count, self.now)
        assert ids == known.lease.claim.block_ids[first : first + count]
        known.writing.append((first, count))

    @precondition(lambda self: any(k.writing for k in self.leases))
    @rule(data=st.data(), ok=st.booleans())
    def end_write(self, data: st.DataObject, ok: bool) -> None:
        known = data.draw(st.sampled_from([k for k in self.leases if k.writing]))
        at = data.draw(st.integers(0, len(known.writing) - 1))
        first, count = known.writing.pop(at)
        self.table.end_write(known.lease.lease_id, first, count, ok, self.now)
        known.deadline = self.now + LEASE_S
        if ok:
            known.landed.update(range(first, first + count))
        with pytest.raises(InternalError):
            self.table.end_write(known.lease.lease_id, first, count, ok, self.now)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.leases))
        lease = known.lease
        whole = known.landed == set(range(len(lease.places)))
        if known.ended or not whole:
            with pytest.raises(LeaseGone):
                self.table.commit(lease.lease_id, EPOCH, lease.ask.key)
            return
        with pytest.raises(LeaseGone):
            self.table.commit(lease.lease_id, EPOCH, key("somebody else"))
        assert self.table.commit(lease.lease_id, EPOCH, lease.ask.key) is lease
        self.attached.append(lease.claim.block_ids)
        known.ended = True

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.leases))
        self.table.end(known.lease)
        known.ended = True

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), owner=st.sampled_from(["owner", "stranger"]))
    def renew(self, data: st.DataObject, owner: str) -> None:
        known = data.draw(st.sampled_from(self.leases))
        self.table.renew(known.lease.ask.key, owner, self.now)
        if owner == "owner":
            known.deadline = self.now + LEASE_S

    @rule(seconds=st.sampled_from([1.0, LEASE_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        expected = [k for k in self.leases if k.overdue(self.now)]
        assert self.table.overdue(self.now) == [k.lease for k in expected]
        for known in expected:
            self.table.end(known.lease)
            known.ended = True

    @rule()
    def unknown_lease_is_gone(self) -> None:
        with pytest.raises(LeaseGone):
            self.table.begin(LeaseId("none"), EPOCH, 0, 1, self.now)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.pool.check_integrity([*self.table.tables(), *self.attached])
        assert self.pool.quarantined == self.table.fenced_blocks()
        assert len(self.table) == sum(not k.ended for k in self.leases)

    def teardown(self) -> None:
        for known in self.leases:
            self.table.end(known.lease)
            for first, count in known.writing:
                self.table.end_write(known.lease.lease_id, first, count, False, self.now)
        for ids in self.attached:
            self.pool.release(ids)
        self.pool.check_integrity([])
        assert self.pool.free == TOTAL


TestLeaseTableMachine = LeaseTableMachine.TestCase
TestLeaseTableMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
