"""`engine.grammar.matching` over xgrammar (Dong et al., arXiv:2411.15100).

The only file that imports it, and only imported when a first grammar comes: it brings
transformers along, which takes seconds.
"""

import re
from collections.abc import Callable, Mapping

import xgrammar
from torch import Tensor

from core.sampling import Grammar, GrammarKind
from engine.grammar.rejection import rejected
from engine.grammar.vocabulary import Vocabulary

_ANY_OBJECT = '{"type": "object", "additionalProperties": true}'
_WHITESPACE = 8
"""Blanks in a row between JSON's tokens, at most: small models would go on with them for ever."""
_SOURCE = re.compile(r"^(\[[\d:]+\] \S+:\d+: )?(Check failed: .* is (false|true): )?")
_SAID_CHARS = 500
_CHARACTERS = re.compile(r'\[\^(?:\\0-\\x1f)?(?=\\"\\\\\\r\\n\])')
"""The start of the class of a string's characters, as xgrammar prints it; without the control
characters where the length is limited."""
_NOT_IN_JSON = r"[^\0-\x1f\ud800-\udfff"


class XMatcher:
    """`Matcher`."""

    def __init__(self, own: xgrammar.GrammarMatcher) -> None:
        self._own = own

    @property
    def ended(self) -> bool:
        return self._own.is_terminated()

    @property
    def complete(self) -> bool:
        return self._own.is_completed()

    def take(self, token: int) -> bool:
        return self._own.accept_token(token)

    def rollback(self, tokens: int) -> None:
        self._own.rollback(tokens)

    def fill(self, row: Tensor) -> None:
        self._own.fill_next_token_bitmask(row[None])


class XCompiled:
    """`Compiled`."""

    def __init__(self, own: xgrammar.CompiledGrammar) -> None:
        self._own = own
        self.nbytes = own.memory_size_bytes

    def matcher(self) -> XMatcher:
        return XMatcher(xgrammar.GrammarMatcher(self._own))

    def dump(self) -> bytes:
        return self._own.serialize_json().encode()


class Toolkit:
    """xgrammar for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._info = xgrammar.TokenizerInfo(
            list(vocabulary.tokens),
            xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary.tokens),
            stop_token_ids=list(vocabulary.eos_ids),
        )
        compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        self._by_kind: Mapping[GrammarKind, Callable[[str], xgrammar.CompiledGrammar]] = {
            GrammarKind.JSON_SCHEMA: lambda source: compiler.compile_grammar(_of_schema(source)),
            GrammarKind.REGEX: compiler.compile_regex,
            GrammarKind.EBNF: compiler.compile_grammar,
            GrammarKind.STRUCTURAL_TAG: lambda source: compiler.compile_grammar(
                valid_json(xgrammar.Grammar.from_structural_tag(source))
            ),
        }

    def compile(self, grammar: Grammar) -> XCompiled:
        """Raises BadRequest saying what xgrammar said, or that no output at all matches."""
        try:
            compiled = XCompiled(self._by_kind[grammar.kind](grammar.source))
        except (RuntimeError, ValueError, TypeError) as error:
            said = _SOURCE.sub("", str(error)).strip()[:_SAID_CHARS]
            raise rejected(grammar, f"is not usable: {said}") from error
        first = xgrammar.allocate_token_bitmask(1, self._info.vocab_size)
        compiled.matcher().fill(first[0])
        if not first.any():
            raise rejected(grammar, "allows no output at all with this model's tokens")
        return compiled

    def load(self, dumped: bytes) -> XCompiled:
        """What `XCompiled.dump` gave, with the same vocabulary."""
        return XCompiled(xgrammar.CompiledGrammar.deserialize_json(dumped.decode(), self._info))


def _of_schema(source: str) -> xgrammar.Grammar | str:
    made = xgrammar.Grammar.from_json_schema(source or _ANY_OBJECT, max_whitespace_cnt=_WHITESPACE)
    return valid_json(made)


def valid_json(grammar: xgrammar.Grammar) -> xgrammar.Grammar | str:
    """xgrammar 0.2.9 lets control characters into strings with minLength or maxLength, where JSON
    has none, and halves of surrogate pairs into all, which UTF-8 has none of: rule them out."""
    printed, count = _CHARACTERS.subn(lambda _: _NOT_IN_JSON, str(grammar))
    return printed if count else grammar
