"""Masks of a batch: those of xgrammar's own matcher after the same output, whatever came before."""

import random
from collections.abc import Iterable

import pytest
import torch
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from core.clock import ManualClock
from core.errors import BadRequest
from core.ids import AttemptKey, RequestId
from core.sampling import Grammar, GrammarKind, Sampling
from engine.grammar.book import REPLAY_CPU_S, STEP_CPU_S, GrammarBook
from engine.grammar.follower import Follower
from engine.grammar.shelf import IN_USE_S, GrammarShelf
from engine.grammar.xgr import valid_json
from engine.policy.plan import SampleAt
from tests.unit.grammar_help import (
    EOS,
    GRAMMARS,
    TOKENS,
    TOOLKIT,
    Direct,
    regex,
    settled,
)

KIND = GrammarKind
PROMPT = (9, 9, 9)
WIDTH = len(TOKENS) // 32
SHELF = GrammarShelf([Direct()])


def of(tokens: Iterable[int]) -> torch.Tensor:
    row = [0] * WIDTH
    for token in tokens:
        row[token // 32] |= 1 << token % 32
    return torch.tensor(row, dtype=torch.int64).to(torch.int32)


def book_on(shelf: GrammarShelf = SHELF, **changes: object) -> GrammarBook:
    return GrammarBook(shelf, len(TOKENS), [EOS], **changes)  # type: ignore[arg-type]


def ask(
    grammar: Grammar | None,
    output: Iterable[int] = (),
    name: str = "a",
    stops: tuple[int, ...] = (),
) -> SampleAt:
    if grammar is not None:
        assert settled(SHELF, grammar).ready
    tokens = (*PROMPT, *output)
    sampling = Sampling(grammar=grammar, stop_token_ids=stops)
    key = AttemptKey(RequestId(name), 0)
    return SampleAt(sampling, len(tokens) - len(PROMPT), tokens, len(PROMPT), key=key)


def xgrammars_own(kind: GrammarKind) -> xgrammar.GrammarMatcher:
    info = xgrammar.TokenizerInfo(list(TOKENS), vocab_size=len(TOKENS), stop_token_ids=[EOS])
    compiler = xgrammar.GrammarCompiler(info)
    own, source = xgrammar.Grammar, GRAMMARS[kind].source
    grammar = {
        KIND.JSON_SCHEMA: lambda: valid_json(own.from_json_schema(source, max_whitespace_cnt=8)),
        KIND.REGEX: lambda: own.from_regex(source),
        KIND.EBNF: lambda: own.from_ebnf(source),
        KIND.STRUCTURAL_TAG: lambda: valid_json(own.from_structural_tag(source)),
    }[kind]()
    return xgrammar.GrammarMatcher(compiler.compile_grammar(grammar))


def walk(kind: GrammarKind, seed: int) -> tuple[list[int], list[torch.Tensor]]:
    """A random output to its end, and xgrammar's masks on the way."""
    matcher, choice = xgrammars_own(kind), random.Random(seed)
    output: list[int] = []
    masks = []
    while not matcher.is_terminated():
        mask = xgrammar.allocate_token_bitmask(1, len(TOKENS))
        matcher.fill_next_token_bitmask(mask)
        masks.append(mask[0])
        words = mask[0].tolist()
        output.append(choice.choice([t for t in range(256) if words[t // 32] >> t % 32 & 1]))
        assert matcher.accept_token(output[-1])
    return output, masks


@pytest.mark.parametrize("kind", KIND)
def test_step_by_step_the_masks_are_those_of_xgrammars_matcher(kind: KIND) -> None:
    book = book_on()
    for seed in range(3):
        output, masks = walk(kind, seed)
        for i, expected in enumerate(masks):
            mask = book.mask([ask(GRAMMARS[kind], output[:i], f"{kind}-{seed}")])
            assert mask is not None
            assert torch.equal(mask[0], expected)


def test_rows_without_a_grammar_allow_all_and_a_batch_of_them_has_no_mask() -> None:
    book = book_on()
    mask = book.mask([ask(None), ask(regex("ab")), ask(None)])
    assert mask is not None
    assert mask.dtype == torch.int32
    assert torch.equal(mask[1], of([TOKENS.index(b"a"), TOKENS.index(b"ab")]))
    assert (mask[[0, 2]] == -1).all()
    assert book.mask([ask(None)]) is None


OUTPUTS = {kind: [walk(kind, seed)[0] for seed in range(4)] for kind in KIND}


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_whatever_was_asked_before_the_mask_depends_on_the_output_alone(
    data: st.DataObject,
) -> None:
    """Forwards, back (drafts that were not accepted), other outputs, another attempt."""
    kind = data.draw(st.sampled_from(list(KIND)))
    lived = book_on()
    for _ in range(data.draw(st.integers(1, 12))):
        output = data.draw(st.sampled_from(OUTPUTS[kind]))
        until = data.draw(st.integers(0, len(output) - 1))
        name = data.draw(st.sampled_from("ab"))
        one = ask(GRAMMARS[kind], output[:until], name)
        assert torch.equal(lived.mask([one, one]), book_on().mask([one, one]))


def test_drafts_are_followed_and_taken_back() -> None:
    follower = Follower(TOOLKIT.compile(regex("abc(d|x)ef")).matcher())
    a, b, c, d, e, x = (TOKENS.index(t.encode()) for t in "abcdex")
    nothing = of(())
    row = nothing.clone()
    assert follower.follow((a, b, c, d, e)) == 5
    follower.rollback(2)
    follower.fill(row, of([EOS]), nothing)
    assert torch.equal(row, of([d, x]))
    assert follower.follow((a, b, c, x)) == 1
    follower.fill(row, of([EOS]), nothing)
    assert torch.equal(row, of([e]))
    assert follower.follow((a,)) == 0
    follower.fill(row, of([EOS]), nothing)
    assert torch.equal(row, of([b]))


def test_after_the_end_or_a_token_that_does_not_belong_only_the_end_may_come() -> None:
    book = book_on()
    a, b, z = (TOKENS.index(t.encode()) for t in "abz")
    for output in ([a, b, EOS], [a, b, EOS, EOS], [z], [a, z, b]):
        mask = book.mask([ask(regex("ab"), output)])
        assert torch.equal(mask[0], of([EOS]))
    assert torch.equal(book.mask([ask(regex("ab"), [a])])[0], of([b]))


def test_where_the_vocabulary_has_nothing_that_fits_the_end_comes() -> None:
    dead_end = Grammar(KIND.EBNF, r'root ::= "a" [\x02]')  # no token has this byte
    a = TOKENS.index(b"a")
    assert torch.equal(book_on().mask([ask(dead_end)])[0], of([a]))
    assert torch.equal(book_on().mask([ask(dead_end, [a])])[0], of([EOS]))


def test_stop_tokens_may_come_where_the_output_may_be_whole() -> None:
    a, z = TOKENS.index(b"a"), TOKENS.index(b"z")
    book = book_on()
    assert torch.equal(book.mask([ask(regex("a+"), [], stops=(z,))])[0], of([a]))
    assert torch.equal(book.mask([ask(regex("a+"), [a], stops=(z, 255))])[0], of([a, z, 255, EOS]))


class Cpu(ManualClock):
    """Advances by `step` with every reading."""

    step = 0.0

    def __call__(self) -> float:
        self.advance(self.step)
        return super().__call__()


def test_a_grammar_that_is_slow_to_follow_is_put_away() -> None:
    shelf, cpu, slow = GrammarShelf([Direct()]), Cpu(), regex("a+")
    settled(shelf, slow)
    book = book_on(shelf, cpu=cpu)
    a = TOKENS.index(b"a")
    cpu.step = STEP_CPU_S + 50 * REPLAY_CPU_S
    book.mask([ask(slow, [a] * 60)])  # followed anew, which takes its time
    assert shelf.state(slow, 0.0).ready
    book.mask([ask(slow, [a] * 61)])
    error = shelf.state(slow, 0.0).error
    assert isinstance(error, BadRequest)
    assert "too slow" in error.message


def test_outputs_that_nobody_asks_about_are_forgotten() -> None:
    compiled = Counting()
    shelf, clock = GrammarShelf([compiled]), ManualClock()
    one, other = regex("a+"), regex("b+")
    for grammar in (one, other):
        settled(shelf, grammar)
    book = book_on(shelf, clock=clock)
    book.mask([ask(one), ask(other)])
    book.mask([ask(one), ask(other)])
    assert compiled.matchers == 2
    clock.advance(IN_USE_S + 1)
    book.mask([ask(one)])
    book.mask([ask(one), ask(other)])
    assert compiled.matchers == 3


class Counting(Direct):
    """Counts the matchers that are made."""

    matchers = 0

    def compile(self, grammar: Grammar) -> "Counting.Compiled":
        return Counting.Compiled(self, super().compile(grammar))

    class Compiled:
        def __init__(self, counting: "Counting", own: object) -> None:
            self._counting, self._own = counting, own
            self.nbytes = 1

        def matcher(self) -> object:
            self._counting.matchers += 1
            return self._own.matcher()  # type: ignore[attr-defined]
