"""Grammars compiled in a process of its own, which is killed when one takes too long."""

import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from core.errors import BadRequest, InternalError, ModelUnsupported
from core.sampling import Grammar, GrammarKind
from engine.grammar.isolated import IsolatedCompiler
from engine.grammar.vocabulary import read_vocabulary
from engine.model.refs import resolve
from tests.rig.processes import alive, children, until
from tests.rig.spelling import give_tokenizer
from tests.rig.tiny import CONFIG, tiny_model
from tests.unit.grammar_help import GRAMMARS, TOKENS, TOOLKIT, VOCABULARY, regex

COMPILE_S = 1.0
LIMIT_S = 60.0
ENDLESS = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {f"p{i}": {"type": "string"} for i in range(300)},
            "minProperties": 100,
            "maxProperties": 200,
        }
    ),
)
"""Keeps xgrammar busy for many minutes, with seven kilobytes of schema."""


@pytest.fixture(scope="module")
def compiler() -> Iterator[IsolatedCompiler]:
    """The tests share it, in their order: to start its process takes seconds."""
    made = IsolatedCompiler(lambda: VOCABULARY, COMPILE_S)
    yield made
    made.close()


def helper() -> int:
    (pid,) = children(os.getpid())
    return pid


def mask(grammar_is: object) -> torch.Tensor:
    row = torch.zeros(len(TOKENS) // 32, dtype=torch.int32)
    grammar_is.matcher().fill(row)  # type: ignore[attr-defined]
    return row


@pytest.mark.parametrize("kind", GrammarKind)
def test_what_comes_back_is_what_would_have_been_made_here(
    compiler: IsolatedCompiler, kind: GrammarKind
) -> None:
    compiled = compiler.compile(GRAMMARS[kind])
    assert torch.equal(mask(compiled), mask(TOOLKIT.compile(GRAMMARS[kind])))


def test_a_bad_grammar_costs_nobody_the_process(compiler: IsolatedCompiler) -> None:
    before = helper()
    with pytest.raises(BadRequest, match="Unclosed"):
        compiler.compile(regex("[a"))
    assert helper() == before
    assert compiler.compile(regex("a")).nbytes > 0


def test_its_memory_is_limited_and_it_gives_way_to_the_worker(compiler: IsolatedCompiler) -> None:
    compiler.compile(regex("a"))
    most, _ = resource.prlimit(helper(), resource.RLIMIT_AS)
    assert 0 < most < 64 << 30
    assert os.getpriority(os.PRIO_PROCESS, helper()) > os.getpriority(os.PRIO_PROCESS, 0)


def test_what_takes_too_long_is_killed_and_the_next_grammar_served(
    compiler: IsolatedCompiler,
) -> None:
    compiler.compile(regex("a"))
    before, started = helper(), time.monotonic()
    with pytest.raises(BadRequest, match="takes more than 1 s") as caught:
        compiler.compile(ENDLESS)
    assert caught.value.field == "response_format"
    assert time.monotonic() - started >= COMPILE_S
    assert not alive(before)
    assert compiler.compile(regex("b")).nbytes > 0


def test_a_process_that_was_killed_from_outside_is_nobodys_fault(
    compiler: IsolatedCompiler,
) -> None:
    compiler.compile(regex("a"))
    os.kill(helper(), signal.SIGKILL)
    with pytest.raises(InternalError, match="killed"):
        compiler.compile(regex("b"))


def test_a_model_without_a_tokenizer_or_an_end_is_told_apart_from_a_bad_grammar(
    tmp_path: Path,
) -> None:
    folder = tiny_model(tmp_path / "tiny")
    with pytest.raises(ModelUnsupported, match=r"tokenizer\.json"):
        IsolatedCompiler(lambda: read_vocabulary(resolve(str(folder)))).compile(regex("a"))
    give_tokenizer(folder, TOKENS)
    assert read_vocabulary(resolve(str(folder))) == VOCABULARY
    (folder / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": []}))
    with pytest.raises(ModelUnsupported, match="end-of-sequence"):
        read_vocabulary(resolve(str(folder)))


def test_closed_it_starts_nothing() -> None:
    closed = IsolatedCompiler(lambda: VOCABULARY, COMPILE_S)
    closed.close()
    with pytest.raises(InternalError, match="stopping"):
        closed.compile(regex("a"))
    assert until(lambda: not children(os.getpid()), LIMIT_S)
