"""What is ready, on its way, or not to be had; and that nothing ever waits for a compiler."""

import threading
from collections.abc import Iterator

import pytest

from core.errors import BadRequest, DeadlineExceeded, InternalError
from core.sampling import MAX_GRAMMAR_BYTES, Grammar
from engine.grammar import shelf as shelf_module
from engine.grammar.matching import Compiled, Compiler
from engine.grammar.shelf import IN_USE_S, WAIT_S, GrammarShelf
from engine.policy.grammars import PENDING, READY
from tests.unit.grammar_help import LIMIT_S, Direct, regex, settled

SLOW, QUICK = regex("slow"), regex("quick")


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_asking_starts_a_compile_and_never_waits_for_it(gate: threading.Event) -> None:
    shelf = GrammarShelf([Direct({"slow": gate})])
    assert shelf.state(SLOW, 0.0) == PENDING
    assert shelf.state(SLOW, 1.0) == PENDING
    gate.set()
    assert settled(shelf, SLOW) == READY
    assert shelf.matcher(SLOW).take(ord("s"))


def test_it_is_compiled_once(gate: threading.Event) -> None:
    compiler = Direct()
    shelf = GrammarShelf([compiler])
    for _ in range(3):
        assert settled(shelf, QUICK) == READY
    assert compiler.compiled == ["quick"]


def test_one_that_takes_long_does_not_keep_others_from_being_compiled(
    gate: threading.Event,
) -> None:
    shelf = GrammarShelf([Direct({"slow": gate}), Direct({"slow": gate})])
    assert shelf.state(SLOW, 0.0) == PENDING
    assert settled(shelf, QUICK) == READY
    assert shelf.state(SLOW, 0.0) == PENDING


def test_the_second_compiler_is_not_used_while_the_first_will_do() -> None:
    first, second = Direct(), Direct()
    shelf = GrammarShelf([first, second])
    for i in range(5):
        settled(shelf, regex(f"r{i}"))
    assert not second.compiled


def test_waiting_too_long_for_a_compiler_is_told_and_passes(gate: threading.Event) -> None:
    shelf = GrammarShelf([Direct({"slow": gate})])
    shelf.state(SLOW, 0.0)
    shelf.state(QUICK, 0.0)
    assert shelf.state(QUICK, WAIT_S) == PENDING
    assert isinstance(shelf.state(QUICK, WAIT_S + 1).error, DeadlineExceeded)
    gate.set()
    assert settled_after(shelf, QUICK, WAIT_S + 1) == READY


def settled_after(shelf: GrammarShelf, grammar: Grammar, now: float) -> object:
    deadline = threading.Event()
    for _ in range(int(LIMIT_S * 100)):
        state = shelf.state(grammar, now)
        if state.ready:
            return state
        deadline.wait(0.01)
    raise AssertionError("never ready")


def test_a_bad_grammar_stays_bad_without_another_look() -> None:
    compiler = Direct()
    shelf = GrammarShelf([compiler])
    for _ in range(3):
        assert isinstance(settled(shelf, regex("[")).error, BadRequest)
    assert compiler.compiled == ["["]


class Broken:
    """Fails once in a way that has nothing to do with the grammar."""

    def __init__(self, failure: Exception) -> None:
        self.failures = [failure]

    def compile(self, grammar: Grammar) -> Compiled:
        if self.failures:
            raise self.failures.pop()
        return Direct().compile(grammar)

    def close(self) -> None: ...


@pytest.mark.parametrize("failure", [InternalError("no helper"), OSError("no memory")])
def test_a_compiler_that_fails_is_told_of_and_tried_again(failure: Exception) -> None:
    shelf = GrammarShelf([Broken(failure)])
    error = settled(shelf, QUICK).error
    assert isinstance(error, InternalError)
    assert str(failure.args[0]) in error.message
    assert settled(shelf, QUICK) == READY


def test_a_source_that_is_too_long_reaches_no_compiler() -> None:
    compiler = Direct()
    error = settled(GrammarShelf([compiler]), regex("é" * (MAX_GRAMMAR_BYTES // 2 + 1))).error
    assert isinstance(error, BadRequest)
    assert str(MAX_GRAMMAR_BYTES) in error.message
    assert not compiler.compiled


def test_one_that_is_too_large_when_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf_module, "COMPILED_BYTES", 10)
    assert isinstance(settled(GrammarShelf([Direct()]), QUICK).error, BadRequest)


def test_the_least_recently_used_makes_room_and_one_in_use_never_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = Direct()
    shelf = GrammarShelf([compiler])
    old, used, new = regex("old"), regex("used"), regex("new")
    later = IN_USE_S + 1
    settled(shelf, old, 0.0)
    settled(shelf, used, 0.0)
    monkeypatch.setattr(shelf_module, "SHELF_BYTES", 1)
    assert shelf.state(used, later) == READY
    assert shelf.state(new, later) == PENDING  # `used` alone fills it
    assert compiler.compiled == ["old", "used"]
    with pytest.raises(InternalError):
        shelf.matcher(old)
    assert shelf.matcher(used).take(ord("u"))
    assert settled(shelf, new, 2 * later + 1) == READY
    with pytest.raises(InternalError):
        shelf.matcher(used)


def test_a_condemned_one_fails_whoever_asks() -> None:
    shelf = GrammarShelf([Direct()])
    settled(shelf, QUICK)
    shelf.condemn(QUICK, "is too slow")
    for _ in range(2):
        error = shelf.state(QUICK, 0.0).error
        assert isinstance(error, BadRequest)
        assert "too slow" in error.message
    assert shelf.matcher(QUICK).take(ord("q"))  # the step that is under way


def test_whoever_is_bound_hears_of_every_change(gate: threading.Event) -> None:
    heard = threading.Event()
    shelf = GrammarShelf([Direct({"slow": gate})])
    shelf.bind(heard.set)
    shelf.state(SLOW, 0.0)
    assert not heard.is_set()
    gate.set()
    assert heard.wait(LIMIT_S)


def test_closing_closes_the_compilers() -> None:
    compilers: list[Compiler] = [Direct(), Direct()]
    GrammarShelf(compilers).close()
    assert all(c.closed for c in compilers)  # type: ignore[attr-defined]
