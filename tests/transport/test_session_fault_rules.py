"""Which message a fault rule hits."""

from hypothesis import given
from hypothesis import strategies as st

from core.spec import FaultSpec
from transport.faulty import DATA, FaultInjector, corrupted, truncated

NAMES = ("Reserve", "Grant", DATA)
rules = st.lists(
    st.builds(
        FaultSpec,
        on=st.sampled_from((*NAMES, "*")),
        action=st.sampled_from(("drop", "delay")),
        skip=st.integers(0, 4),
        count=st.integers(0, 4),
    ),
    max_size=4,
)


def hits(rule: FaultSpec, names: list[str]) -> list[int]:
    """Positions that one rule alone must hit: the specification, written the slow way."""
    seen = [i for i, n in enumerate(names) if rule.on == n or (rule.on == "*" and n != DATA)]
    due = seen[rule.skip :]
    return due[: rule.count] if rule.count else due


@given(rules, st.lists(st.sampled_from(NAMES), max_size=30))
def test_the_first_due_rule_takes_a_message_and_hides_it_from_later_rules(specs, names):
    expected: dict[int, int] = {}
    left = list(range(len(names)))
    for r, rule in enumerate(specs):
        taken = [left[i] for i in hits(rule, [names[i] for i in left])]
        expected |= dict.fromkeys(taken, r)
        left = [i for i in left if i not in expected]
    injector = FaultInjector(specs)
    decided = [injector.decide(name) for name in names]
    assert decided == [specs[expected[i]] if i in expected else None for i in range(len(names))]
    assert injector.hits == tuple(list(expected.values()).count(r) for r in range(len(specs)))


def test_replacing_the_rules_starts_counting_anew():
    rule = FaultSpec("Grant", "drop", skip=1)
    injector = FaultInjector([rule])
    assert [injector.decide("Grant"), injector.decide("Grant")] == [None, rule]
    injector.set([rule])
    assert injector.hits == (0,)
    assert [injector.decide("Grant"), injector.decide("Grant")] == [None, rule]
    injector.set(())
    assert not injector.active
    assert injector.decide("Grant") is None


@given(st.binary(min_size=1, max_size=64))
def test_damage_always_changes_the_frame(frame):
    assert len(truncated(frame)) < len(frame)
    assert len(corrupted(frame)) == len(frame)
    assert corrupted(frame) != frame
    assert corrupted(corrupted(frame)) == frame
