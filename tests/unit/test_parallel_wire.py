"""A plan survives the way to the other ranks, but for how to sample."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from core.ids import AttemptKey
from core.sampling import Sampling
from engine.parallel.wire import decode, encode
from engine.policy.plan import LayerGroup, Plan, SampleAt, Work

SMALL = st.integers(0, 2**31 - 1)
ASKS = st.builds(
    SampleAt,
    st.builds(Sampling, temperature=st.floats(0, 2), seed=st.integers()),
    st.integers(0, 99),
    st.lists(SMALL).map(tuple),
)
WORKS = st.builds(
    Work,
    st.builds(AttemptKey, st.text(), st.integers(0, 9)),
    st.lists(SMALL).map(tuple),
    SMALL,
    st.lists(SMALL).map(tuple),
    st.none() | ASKS,
    st.none() | st.builds(LayerGroup, SMALL, SMALL, SMALL),
)


@given(st.lists(WORKS).map(tuple))
def test_a_plan_arrives_as_it_was_but_for_how_to_sample(works: tuple[Work, ...]) -> None:
    arrived = decode(encode(Plan(works)))
    plain = SampleAt(Sampling(), 0)
    expected = (replace(w, sample=None if w.sample is None else plain) for w in works)
    assert arrived == Plan(tuple(expected))


def test_every_part_of_a_work_is_sent() -> None:
    """A new field of Work is one that the other ranks must get too: add it to the wire."""
    assert Work.__slots__ == ("key", "token_ids", "start", "block_ids", "sample", "layers")
    assert Plan.__slots__ == ("works",)
