"""BlockPool: what the state machine cannot say, one rule at a time."""

import pytest

from core.errors import InternalError
from core.ids import BlockHash, BlockId
from engine.policy.blocks import BlockPool

A, B, C, D = (BlockHash(bytes([i])) for i in range(4))


def cached(pool: BlockPool, *hashes: BlockHash) -> tuple[BlockId, ...]:
    """Blocks with these hashes that nobody holds."""
    ids = pool.allocate(len(hashes))
    assert ids is not None
    for block, block_hash in zip(ids, hashes, strict=True):
        pool.publish(block, block_hash)
    pool.release(ids)
    return ids


def test_the_longest_cached_prefix_matches_and_a_gap_ends_it() -> None:
    pool = BlockPool(4)
    ids = cached(pool, A, B, D)
    assert pool.match([A, B, C, D]) == ids[:2]


def test_free_blocks_are_used_before_cached_ones_are_evicted() -> None:
    pool = BlockPool(3)
    cached(pool, A, B)
    pool.allocate(1)
    assert pool.cached == 2


def test_the_least_recently_used_block_is_evicted_first() -> None:
    pool = BlockPool(2)
    cached(pool, A)
    cached(pool, B)
    pool.release(pool.match([A]))
    pool.allocate(1)
    assert pool.match([B]) == ()
    assert len(pool.match([A])) == 1


def test_of_an_idle_chain_the_tail_is_evicted_first() -> None:
    pool = BlockPool(3)
    ids = cached(pool, A, B, C)
    pool.allocate(1)
    assert pool.match([A, B, C]) == ids[:2]


def test_a_block_in_use_is_never_evicted() -> None:
    pool = BlockPool(2)
    cached(pool, A)
    pool.match([A])
    assert pool.allocate(2) is None
    assert pool.free == 1


def test_a_failed_claim_takes_nothing() -> None:
    pool = BlockPool(3)
    cached(pool, A)
    assert pool.claim([A], 3, headroom=1) is None
    assert pool.free == 3
    pool.check_integrity([])


def test_matched_idle_blocks_do_not_count_as_room() -> None:
    pool = BlockPool(3)
    cached(pool, A, B)
    assert pool.claim([A, B], 4, headroom=0) is None
    claim = pool.claim([A, B], 3, headroom=0)
    assert claim is not None
    assert claim.present == 2
    assert pool.free == 0


def test_a_second_block_of_the_same_content_stays_private() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2) or ()
    pool.publish(first, A)
    pool.publish(second, A)
    pool.release([first, second])
    assert pool.cached == 1
    assert pool.match([A]) == (first,)


def test_generation_grows_before_every_change_of_hands_and_never_while_held() -> None:
    generations = [0, 0]
    pool = BlockPool(2, generations)
    (block,) = pool.allocate(1) or ()
    held = generations[block]
    pool.publish(block, A)
    pool.hold([block])
    pool.release([block])
    assert generations[block] == held
    pool.release([block])
    assert pool.match([A]) == (block,)
    assert generations[block] == held, "a cached block that is found again is the same block"
    pool.release([block])
    pool.allocate(2)
    assert generations[block] > held
    held = generations[block]
    pool.release([block])
    assert generations[block] > held, "free without a hash: its content is nobody's"


def test_the_arena_table_serves_as_generations() -> None:
    table = memoryview(bytearray(16)).cast("Q")
    pool = BlockPool(2, table)
    ids = pool.allocate(2) or ()
    assert pool.generations_of(ids) == (1, 1)
    assert list(table) == [1, 1]


def test_quarantined_blocks_are_out_of_reach_until_the_fence() -> None:
    pool = BlockPool(2)
    ids = pool.allocate(1) or ()
    pool.quarantine(ids)
    assert (pool.free, pool.quarantined) == (1, 1)
    assert pool.allocate(2) is None
    pool.unquarantine(ids)
    assert (pool.free, pool.quarantined) == (2, 0)


def test_misuse_is_an_internal_error() -> None:
    pool = BlockPool(2)
    ids = pool.allocate(1) or ()
    pool.publish(ids[0], A)
    with pytest.raises(InternalError, match="another hash"):
        pool.publish(ids[0], B)
    with pytest.raises(InternalError, match="cannot be quarantined"):
        pool.quarantine(ids)
    pool.release(ids)
    for misuse in (pool.release, pool.hold, pool.unquarantine):
        with pytest.raises(InternalError):
            misuse(ids)


def test_integrity_check_names_a_reference_without_a_holder() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1) or ()
    pool.check_integrity([[block]])
    with pytest.raises(InternalError, match=f"block {block} has 1 references, 0 holders"):
        pool.check_integrity([])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda p: p._free.append(p._free[0]), "twice"),
        (lambda p: p._free.pop(), "in none"),
        (lambda p: p._quarantined.add(p._free[0]), "two places"),
        (lambda p: p._index.clear(), "disagree"),
        (lambda p: p._idle.update({p._free.pop(): None}), "no hash"),
        (lambda p: p._refs.__setitem__(p._free.pop(), -1), "in none"),
    ],
    ids=["double-free", "lost", "two-places", "index", "idle-unhashed", "negative"],
)
def test_integrity_check_finds_corruption(spoil: object, says: str) -> None:
    pool = BlockPool(4)
    cached(pool, A)
    pool.check_integrity([])
    spoil(pool)  # type: ignore[operator]
    with pytest.raises(InternalError, match=says):
        pool.check_integrity([])
