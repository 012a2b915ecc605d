"""Prefix hashes, layouts, state tables, errors: the small values everything rests on."""

import itertools
from enum import StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import states
from core.clock import ManualClock
from core.errors import BY_CODE, Incompatible, InternalError, Stage, TriremeError
from core.kvlayout import Compatibility, KVLayout
from core.messages import Fault
from core.prefix import PrefixScope, block_hashes, chain

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=80)
LAYOUT = KVLayout(layers=30, kv_heads=3, block_size=16, head_dim=64, dtype="float32")
RECORD = Compatibility(1, "digest", "kv=float32", LAYOUT)


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_hashes_agree_exactly_as_far_as_the_blocks_do(
    a: list[int], b: list[int], size: int
) -> None:
    seed = PrefixScope("m", "v").seed()
    blocks = [[x[i : i + size] for i in range(0, len(x) - size + 1, size)] for x in (a, b)]
    common = sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], zip(*blocks, strict=False)))
    first, second = block_hashes(seed, a, size), block_hashes(seed, b, size)
    assert first[:common] == second[:common]
    assert not set(first[common:]) & set(second[common:])
    assert len(first) == len(a) // size


@given(st.lists(st.text(max_size=4), min_size=4, max_size=4),
       st.lists(st.text(max_size=4), min_size=4, max_size=4))  # fmt: skip
def test_scopes_never_collide_by_concatenation(a: list[str], b: list[str]) -> None:
    assert (PrefixScope(*a).seed() == PrefixScope(*b).seed()) == (a == b)


def test_a_chain_depends_on_its_parent() -> None:
    one, two = PrefixScope("a", "").seed(), PrefixScope("b", "").seed()
    assert chain(one, [1, 2]) != chain(two, [1, 2])


def test_a_smollm2_block_has_the_size_the_arithmetic_says() -> None:
    assert LAYOUT.block_bytes == 30 * 2 * 3 * 16 * 64 * 4
    assert [LAYOUT.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (Compatibility(2, "digest", "kv=float32", LAYOUT), "wire_version"),
        (Compatibility(1, "other", "kv=float32", LAYOUT), "model_digest"),
        (Compatibility(1, "digest", "kv=int8", LAYOUT), "kv_variant"),
        (Compatibility(1, "digest", "kv=float32", KVLayout(30, 3, 32, 64, "float32")),
         "layout.block_size"),
        (Compatibility(1, "digest", "kv=float32", KVLayout(30, 3, 16, 64, "bfloat16")),
         "layout.dtype"),
        (Compatibility(1, "digest", "kv=float32", LAYOUT, tensor_parallel=2), "tensor_parallel"),
        (Compatibility(1, "digest", "kv=float32", LAYOUT, codec="int4"), "codec"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)  # fmt: skip
def test_the_field_that_differs_is_named(other: Compatibility, field: str) -> None:
    with pytest.raises(Incompatible) as caught:
        RECORD.check(other, "decode-0")
    assert (caught.value.field, caught.value.worker) == (field, "decode-0")
    RECORD.check(RECORD)


TABLES = {
    "request": (states.REQUEST, states.RequestState, states.RequestEvent),
    "lease": (states.LEASE, states.LeaseState, states.LeaseEvent),
    "sequence": (states.SEQUENCE, states.SequenceState, states.SequenceEvent),
    "worker": (states.WORKER, states.WorkerState, states.WorkerEvent),
}
ENDS = {"finished", "failed", "cancelled", "committed", "free", "done", "dead"}


@pytest.mark.parametrize("name", TABLES)
def test_every_state_reaches_an_end_and_ends_are_final(name: str) -> None:
    table, kinds, events = TABLES[name]
    for state in kinds:
        moves = {table[state, e] for e in events if (state, e) in table}
        assert bool(moves) == (state not in ENDS)
        assert reachable(table, state) & ENDS


@pytest.mark.parametrize("name", TABLES)
def test_an_illegal_move_raises_and_names_both(name: str) -> None:
    table, kinds, events = TABLES[name]
    illegal = [(s, e) for s in kinds for e in events if (s, e) not in table]
    assert illegal
    for state, event in illegal:
        with pytest.raises(InternalError, match=f"{event} in state {state}"):
            states.advance(table, state, event)


def reachable(table: dict[tuple[StrEnum, StrEnum], StrEnum], start: StrEnum) -> set[StrEnum]:
    found, todo = {start}, [start]
    while todo:
        here = todo.pop()
        new = {to for (at, _), to in table.items() if at is here} - found
        found |= new
        todo += new
    return found


@pytest.mark.parametrize("code", BY_CODE)
def test_an_error_keeps_its_type_and_facts_as_a_value(code: str) -> None:
    error = BY_CODE[code]("why", stage=Stage.TRANSFER, worker="w", retry_after_s=0.5, field="f")
    back = Fault.of(error).error()
    assert type(back) is type(error)
    assert vars(back) == vars(error)
    assert str(back) == "[transfer@w] why"


def test_codes_are_unique_and_unknown_ones_become_internal() -> None:
    def tree(kind: type[TriremeError]) -> list[type[TriremeError]]:
        return [kind, *(x for child in kind.__subclasses__() for x in tree(child))]

    declared = [k for k in tree(TriremeError) if "code" in vars(k)]
    assert len({k.code for k in declared}) == len(declared)
    assert isinstance(Fault("from the future", "m").error(), InternalError)


def test_a_manual_clock_only_goes_forward() -> None:
    clock = ManualClock(5.0)
    clock.advance(1.5)
    assert clock() == 6.5
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1)
