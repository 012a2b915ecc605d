"""The hashes under which blocks are published are those that router and peers compute."""

from core.prefix import PrefixScope, block_hashes
from engine.policy.chain import PrefixChain


def test_a_chain_that_grows_with_its_sequence_equals_the_hashes_of_the_whole() -> None:
    seed = PrefixScope("m", "v", salt="tenant").seed()
    tokens = list(range(40))
    chain = PrefixChain(seed, 4)
    for blocks in (0, 2, 1, 5, 10):
        assert chain.first(blocks, tokens[: blocks * 4]) == block_hashes(seed, tokens, 4)[:blocks]
