"""Blocks reserved for KV that another worker sends.  States: `core.states.LEASE`.

    LeaseTable ──commit──▶ a sequence owns the blocks
        │
        ├─ end, nobody writes ─▶ pool
        └─ end, a write lands ─▶ quarantine ──last end_write──▶ pool

A place (index into the lease's block table) is written at most once: one that is present, landed
or being written cannot be begun again, so a duplicate or late frame can never touch good KV.
A write that failed empties its place, and the place may be tried again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from core.errors import InternalError, LeaseGone, Stage
from core.ids import AttemptKey, BlockId, Epoch, LeaseId
from core.messages import Reserve
from core.states import LEASE, LeaseEvent, LeaseState, advance
from engine.policy.blocks import BlockPool, Claim
from engine.policy.chain import PrefixChain
from engine.policy.totals import Totals


class Place(StrEnum):
    """One block of a lease."""

    EMPTY = "empty"
    WRITING = "writing"
    LANDED = "landed"


@dataclass(slots=True)
class Lease:
    """Mutable; only its `LeaseTable` writes it.  deadline in seconds on the table's clock."""

    lease_id: LeaseId
    ask: Reserve
    owner: str
    chain: PrefixChain
    claim: Claim
    deadline: float
    places: list[Place]
    state: LeaseState = LeaseState.RESERVED

    @property
    def busy(self) -> bool:
        return Place.WRITING in self.places

    def overdue(self, now: float) -> bool:
        """Nothing kept it alive.  Never true under a write: its writer reports, and until then
        its blocks would be of no use to anybody."""
        return self.deadline < now and not self.busy

    def advance(self, event: LeaseEvent) -> None:
        """Raises InternalError on an illegal move."""
        self.state = advance(LEASE, self.state, event)


class LeaseTable:
    """Owner of the leases and of their references to blocks."""

    def __init__(self, pool: BlockPool, epoch: Epoch, lease_s: float, totals: Totals) -> None:
        self._pool = pool
        self._epoch = epoch
        self._lease_s = lease_s
        self._totals = totals
        self._open: dict[AttemptKey, Lease] = {}
        self._by_id: dict[LeaseId, Lease] = {}

    def __len__(self) -> int:
        """Open leases."""
        return len(self._open)

    def __iter__(self) -> Iterator[Lease]:
        """Open leases."""
        return iter(self._open.values())

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._open

    @property
    def blocks(self) -> int:
        """Blocks in open leases, shared ones once per lease."""
        return sum(len(lease.places) for lease in self)

    def get(self, key: AttemptKey) -> Lease | None:
        return self._open.get(key)

    def open(self, ask: Reserve, owner: str, chain: PrefixChain, claim: Claim, now: float) -> Lease:
        """Take over the references of `claim` until the lease is committed or ends."""
        if ask.key in self._open:
            raise InternalError(f"attempt {ask.key} has a lease already")
        self._totals.leases_granted += 1
        missing = len(claim.block_ids) - claim.present
        lease = Lease(
            lease_id=LeaseId(f"{self._epoch:x}-{self._totals.leases_granted:x}"),
            ask=ask,
            owner=owner,
            chain=chain,
            claim=claim,
            deadline=now + self._lease_s,
            places=[Place.LANDED] * claim.present + [Place.EMPTY] * missing,
        )
        self._open[ask.key] = self._by_id[lease.lease_id] = lease
        return lease

    def begin(
        self, lease_id: LeaseId, epoch: Epoch, first: int, count: int, now: float
    ) -> tuple[BlockId, ...]:
        """Blocks of places first … first + count - 1, which the caller may write until
        `end_write`.  Raises LeaseGone if the lease ended or is overdue, or any of the places is
        outside it, present, landed or being written."""
        lease = self._live(lease_id, epoch, Stage.TRANSFER)
        if lease.overdue(now):
            raise LeaseGone(
                f"lease {lease_id} was not renewed for {self._lease_s} s; reserve again",
                stage=Stage.TRANSFER,
            )
        span = slice(first, first + count)
        if first < 0 or count < 1 or lease.places[span] != [Place.EMPTY] * count:
            raise LeaseGone(
                f"places {first} to {first + count - 1} of lease {lease_id} are not open for "
                "writing: outside of it, filled, or being filled; do not send them again",
                stage=Stage.TRANSFER,
            )
        lease.advance(LeaseEvent.WRITE)
        lease.places[span] = [Place.WRITING] * count
        return lease.claim.block_ids[span]

    def end_write(self, lease_id: LeaseId, first: int, count: int, ok: bool, now: float) -> None:
        """The write has landed, or never will.  Raises InternalError without a `begin`."""
        lease = self._by_id.get(lease_id)
        span = slice(first, first + count)
        if lease is None or lease.places[span] != [Place.WRITING] * count:
            raise InternalError(
                f"end of a write to places {first} to {first + count - 1} of lease {lease_id} "
                "that nobody began",
                stage=Stage.TRANSFER,
            )
        lease.places[span] = [Place.LANDED if ok else Place.EMPTY] * count
        lease.deadline = now + self._lease_s
        if lease.state is LeaseState.QUARANTINED and not lease.busy:
            lease.advance(LeaseEvent.FENCED)
            del self._by_id[lease_id]
            self._pool.unquarantine(lease.claim.block_ids[lease.claim.present :])

    def commit(self, lease_id: LeaseId, epoch: Epoch, key: AttemptKey) -> Lease:
        """Hand the blocks over to the caller.  Raises LeaseGone unless every place landed."""
        lease = self._live(lease_id, epoch, Stage.ATTACH)
        landed = lease.places.count(Place.LANDED)
        if lease.ask.key != key or landed < len(lease.places):
            raise LeaseGone(
                f"lease {lease_id} belongs to {lease.ask.key} and has {landed} of "
                f"{len(lease.places)} blocks; {key} must reserve again",
                stage=Stage.ATTACH,
            )
        lease.advance(LeaseEvent.COMMIT)
        del self._open[key], self._by_id[lease_id]
        return lease

    def end(self, lease: Lease) -> None:
        """The lease will not be committed.  Idempotent, also after `commit`."""
        if self._open.get(lease.ask.key) is not lease:
            return
        del self._open[lease.ask.key]
        ids, present = lease.claim
        if not lease.busy:
            lease.advance(LeaseEvent.END_IDLE)
            del self._by_id[lease.lease_id]
            self._pool.release(ids)
            return
        lease.advance(LeaseEvent.END_BUSY)
        self._pool.release(ids[:present])
        self._pool.quarantine(ids[present:])
        self._totals.quarantined_total += len(ids) - present

    def renew(self, key: AttemptKey, owner: str, now: float) -> None:
        """The owner still wants it.  Unknown keys and other people's are passed over."""
        lease = self._open.get(key)
        if lease is not None and lease.owner == owner:
            lease.deadline = now + self._lease_s

    def overdue(self, now: float) -> list[Lease]:
        """Open leases that neither a renewal nor progress kept alive."""
        return [lease for lease in self if lease.overdue(now)]

    def tables(self) -> Iterator[tuple[BlockId, ...]]:
        """Every block table that holds references."""
        yield from (lease.claim.block_ids for lease in self)

    def fenced_blocks(self) -> int:
        """Blocks that leases keep in quarantine; the pool must count the same."""
        gone = [x for x in self._by_id.values() if x.state is LeaseState.QUARANTINED]
        return sum(len(x.places) - x.claim.present for x in gone)

    def _live(self, lease_id: LeaseId, epoch: Epoch, stage: Stage) -> Lease:
        lease = self._by_id.get(lease_id)
        if lease is None or epoch != self._epoch or lease.state is LeaseState.QUARANTINED:
            raise LeaseGone(
                f"no lease {lease_id} of epoch {epoch} here (now {self._epoch}): it ended; "
                "reserve again",
                stage=stage,
            )
        return lease
