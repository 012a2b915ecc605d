"""The comparison that decides whether tokens are the same: what it excuses and what not."""

from dataclasses import dataclass

import pytest

from cluster.equality import Mismatch, Verdict, compare


@dataclass(frozen=True)
class Step:
    token: int
    gap: float


CLEAR = [Step(t, 1.0) for t in (5, 6, 7)]
TIED = [Step(5, 1.0), Step(6, 0.0005), Step(7, 1.0)]


def never(prompt: tuple[int, ...], count: int) -> list[int]:
    raise AssertionError("nothing to go on from")


def test_equal_tokens_need_no_excuse() -> None:
    assert compare((1,), CLEAR, [5, 6, 7], never) == Verdict(3)


@pytest.mark.parametrize(("served", "got"), [([5, 9, 7], 9), ([5], None)], ids=["other", "short"])
def test_a_clear_difference_is_named(served: list[int], got: int | None) -> None:
    assert compare((1,), CLEAR, served, never) == Verdict(1, 0, Mismatch(1, 6, got, 1.0))


def test_a_tie_is_excused_and_the_rest_is_asked_for_anew() -> None:
    asked = []

    def ask(prompt: tuple[int, ...], count: int) -> list[int]:
        asked.append((prompt, count))
        return [7]

    assert compare((1,), TIED, [5, 8, 3], ask) == Verdict(3, excused=1)
    assert asked == [((1, 5, 6), 1)]


def test_after_a_tie_a_clear_difference_still_fails() -> None:
    verdict = compare((1,), TIED, [5, 8, 3], lambda prompt, count: [4])
    assert verdict == Verdict(2, 1, Mismatch(2, 7, 4, 1.0))


def test_a_tie_on_the_last_token_asks_for_nothing() -> None:
    assert compare((1,), [Step(5, 0.0001)], [6], never) == Verdict(1, excused=1)
