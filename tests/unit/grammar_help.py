"""A vocabulary of bytes and a few longer tokens, and compilers for it: quick ones, or held up."""

import threading
import time
from dataclasses import dataclass, field

from core.sampling import Grammar, GrammarKind
from engine.grammar.matching import Compiled
from engine.grammar.shelf import GrammarShelf
from engine.grammar.vocabulary import Vocabulary
from engine.grammar.xgr import Toolkit
from engine.policy.grammars import PENDING, GrammarState

LIMIT_S = 20.0
BOS, EOS = 0, 1
LONGER = (b'{"', b'": ', b'", "', b"true", b"</", b"12", b"ab")
TOKENS = (b"", b"", *LONGER, *(bytes([b]) for b in range(2 + len(LONGER), 256)))
"""Id = byte, but for the first: as many as tests.rig.tiny's model has."""
VOCABULARY = Vocabulary(TOKENS, (EOS,))
TOOLKIT = Toolkit(VOCABULARY)

OBJECT = (
    '{"type":"object","properties":{"name":{"type":"string","maxLength":6},'
    '"age":{"type":"integer","minimum":0,"maximum":99},"tags":{"type":"array","maxItems":2,'
    '"items":{"enum":["ab","true"]}}},"required":["name","age","tags"],'
    '"additionalProperties":false}'
)
TAG = (
    '{"type":"structural_tag","format":{"type":"tag","begin":"<a>","content":{"type":"json_schema",'
    '"json_schema":{"type":"string","maxLength":6}},"end":"</a>"}}'
)
WORDS = 'root ::= word ("-" word)* "."\nword ::= [a-c]{1,3}'
GRAMMARS = {
    GrammarKind.JSON_SCHEMA: Grammar(GrammarKind.JSON_SCHEMA, OBJECT),
    GrammarKind.REGEX: Grammar(GrammarKind.REGEX, r"(ab|cd){2,5}x?[0-9]{3}"),
    GrammarKind.EBNF: Grammar(GrammarKind.EBNF, WORDS),
    GrammarKind.STRUCTURAL_TAG: Grammar(GrammarKind.STRUCTURAL_TAG, TAG),
}


def regex(source: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, source)


def text_of(tokens: list[int] | tuple[int, ...]) -> str:
    return b"".join(TOKENS[t] for t in tokens).decode(errors="replace")


@dataclass
class Direct:
    """Compiles here and now.  gates: grammars that are held up until their event is set.
    compiled: what was asked for, in order."""

    gates: dict[str, threading.Event] = field(default_factory=dict)
    compiled: list[str] = field(default_factory=list)
    closed: bool = False

    def compile(self, grammar: Grammar) -> Compiled:
        self.compiled.append(grammar.source)
        if grammar.source in self.gates:
            assert self.gates[grammar.source].wait(LIMIT_S)
        return TOOLKIT.compile(grammar)

    def close(self) -> None:
        self.closed = True


def settled(shelf: GrammarShelf, grammar: Grammar, now: float = 0.0) -> GrammarState:
    """Its state once it is compiled, or not to be."""
    end = time.monotonic() + LIMIT_S
    while (state := shelf.state(grammar, now)) == PENDING:
        assert time.monotonic() < end, "still being compiled"
        time.sleep(0.001)
    return state
