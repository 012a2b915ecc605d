"""BlockPool against a model that knows who holds what and which block has which content."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.ids import BlockHash, BlockId
from engine.policy.blocks import BlockPool

TOTAL = 7
HASHES = [BlockHash(bytes([i])) for i in range(6)]


class BlockPoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.generations = [100] * TOTAL
        self.pool = BlockPool(TOTAL, self.generations)
        self.tables: list[tuple[BlockId, ...]] = []
        self.fenced: list[tuple[BlockId, ...]] = []
        self.content: dict[BlockId, BlockHash] = {}
        self.seen = list(self.generations)

    def held(self) -> set[BlockId]:
        return {b for t in self.tables for b in t}

    def taken(self, fresh: tuple[BlockId, ...]) -> None:
        """Newly allocated blocks are nobody else's and have lost what they held."""
        assert not set(fresh) & (self.held() | {b for t in self.fenced for b in t})
        assert len(set(fresh)) == len(fresh)
        for block in fresh:
            self.content.pop(block, None)
            assert self.generations[block] > self.seen[block]

    @rule(count=st.integers(0, TOTAL))
    def allocate(self, count: int) -> None:
        free = self.pool.free
        fresh = self.pool.allocate(count)
        assert (fresh is None) == (count > free)
        if fresh is not None:
            self.taken(fresh)
            self.tables.append(fresh)

    @rule(
        first=st.integers(0, 5),
        matchable=st.integers(0, 3),
        extra=st.integers(0, 3),
        headroom=st.integers(0, 2),
    )
    def claim(self, first: int, matchable: int, extra: int, headroom: int) -> None:
        hashes = HASHES[first : first + matchable]
        by_hash = {h: b for b, h in self.content.items()}
        prefix = []
        for block_hash in hashes:
            if block_hash not in by_hash:
                break
            prefix.append(by_hash[block_hash])
        idle = set(self.content) - self.held()
        fits = len(hashes) + extra - len(prefix) + headroom <= self.pool.free - len(
            idle & set(prefix)
        )
        claim = self.pool.claim(hashes, len(hashes) + extra, headroom)
        assert (claim is not None) == fits
        if claim is not None:
            assert list(claim.block_ids[: claim.present]) == prefix
            self.taken(claim.block_ids[claim.present :])
            self.tables.append(claim.block_ids)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.hold(table)
        self.tables.append(table)

    @precondition(lambda self: self.held() - set(self.content))
    @rule(data=st.data(), block_hash=st.sampled_from(HASHES))
    def publish(self, data: st.DataObject, block_hash: BlockHash) -> None:
        block = data.draw(st.sampled_from(sorted(self.held() - set(self.content))))
        self.pool.publish(block, block_hash)
        if block_hash not in self.content.values():
            self.content[block] = block_hash

    @precondition(lambda self: self.private())
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.private()))
        self.tables.remove(table)
        self.pool.quarantine(table)
        self.fenced.append(table)

    def private(self) -> list[tuple[BlockId, ...]]:
        """Tables whose blocks are in no other table and in no index."""
        every = [b for t in self.tables for b in t]
        return [
            t
            for t in self.tables
            if t and all(every.count(b) == 1 and b not in self.content for b in t)
        ]

    @precondition(lambda self: self.fenced)
    @rule()
    def unquarantine(self) -> None:
        self.pool.unquarantine(self.fenced.pop())

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.pool.check_integrity(self.tables)
        fenced = sum(map(len, self.fenced))
        assert self.pool.quarantined == fenced
        assert self.pool.free == TOTAL - len(self.held()) - fenced
        assert self.pool.cached == len(self.content)

    @invariant()
    def generations_change_only_with_the_owner(self) -> None:
        for block in range(TOTAL):
            assert self.generations[block] >= self.seen[block]
        self.seen = list(self.generations)

    @rule()
    def a_held_block_keeps_its_generation(self) -> None:
        before = self.pool.generations_of(sorted(self.held()))
        for block in self.pool.allocate(self.pool.free) or ():
            self.content.pop(block, None)
            self.pool.release([block])
        assert self.pool.generations_of(sorted(self.held())) == before

    def teardown(self) -> None:
        for table in self.tables:
            self.pool.release(table)
        for table in self.fenced:
            self.pool.unquarantine(table)
        self.pool.check_integrity([])
        assert self.pool.free == TOTAL


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
