"""What xgrammar makes of grammars, and how it is told that one is wrong."""

import pytest
import torch

from core.errors import BadRequest
from core.sampling import Grammar, GrammarKind
from engine.grammar.matching import Compiled
from engine.grammar.vocabulary import Vocabulary
from engine.grammar.xgr import Toolkit
from tests.unit.grammar_help import EOS, GRAMMARS, TOKENS, TOOLKIT, VOCABULARY, regex

KIND = GrammarKind


def allowed(compiled: Compiled, output: bytes = b"") -> set[bytes]:
    """What may come after `output`, token by token; the end is b""."""
    matcher = compiled.matcher()
    for byte in output:
        assert matcher.take(TOKENS.index(bytes([byte])))
    row = torch.zeros(len(TOKENS) // 32, dtype=torch.int32)
    matcher.fill(row)
    return {TOKENS[t] for t in range(len(TOKENS)) if int(row[t // 32]) >> t % 32 & 1}


def test_a_regex_allows_what_may_follow_and_at_its_end_only_the_end() -> None:
    compiled = TOOLKIT.compile(regex("ab+c?"))
    assert allowed(compiled) == {b"a", b"ab"}
    assert allowed(compiled, b"abb") == {b"b", b"c", b""}
    assert allowed(compiled, b"abc") == {b""}


def test_the_empty_schema_is_any_object_and_nothing_but_an_object() -> None:
    compiled = TOOLKIT.compile(Grammar(KIND.JSON_SCHEMA, ""))
    assert allowed(compiled) & {b'{"', b"{", b"[", b"true", b"12"} == {b'{"', b"{"}
    assert b"true" in allowed(compiled, b'{"x":')


def test_an_object_has_no_other_properties_than_its_schema_names() -> None:
    schema = '{"type":"object","properties":{"x":{"type":"integer"}}%s}'
    closed = TOOLKIT.compile(Grammar(KIND.JSON_SCHEMA, schema % ""))
    opened = TOOLKIT.compile(Grammar(KIND.JSON_SCHEMA, schema % ',"additionalProperties":true'))
    assert b"y" not in allowed(closed, b'{"')
    assert b"y" in allowed(opened, b'{"')


def test_blanks_do_not_go_on_for_ever() -> None:
    compiled = TOOLKIT.compile(GRAMMARS[KIND.JSON_SCHEMA])
    assert b" " in allowed(compiled, b"{" + 7 * b" ")
    assert b" " not in allowed(compiled, b"{" + 8 * b" ")


@pytest.mark.parametrize("limits", ["", ',"maxLength":9', ',"minLength":1'])
def test_no_string_has_control_characters_for_json_has_none(limits: str) -> None:
    schema = f'{{"type":"string"{limits}}}'
    tag = f'{{"type":"structural_tag","format":{{"type":"json_schema","json_schema":{schema}}}}}'
    for grammar in (Grammar(KIND.JSON_SCHEMA, schema), Grammar(KIND.STRUCTURAL_TAG, tag)):
        after = allowed(TOOLKIT.compile(grammar), b'"a')
        assert {b"z", b" ", b'"'} <= after
        assert not [token for token in after if min(token, default=99) < 32]


def test_a_structural_tag_is_free_until_a_trigger() -> None:
    source = (
        '{"type":"structural_tag","format":{"type":"triggered_tags","triggers":["<f="],"tags":'
        '[{"type":"tag","begin":"<f=x>","content":{"type":"regex","pattern":"[0-9]"},'
        '"end":"</f>"}]}}'
    )
    compiled = TOOLKIT.compile(Grammar(KIND.STRUCTURAL_TAG, source))
    assert {b"z", b""} <= allowed(compiled, b"hello")
    assert allowed(compiled, b"hello <f=") == {b"x"}
    assert b"z" not in allowed(compiled, b"hello <f=x>")
    assert {b"z", b""} <= allowed(compiled, b"hello <f=x>7</f> and")


@pytest.mark.parametrize("kind", KIND)
def test_special_and_padding_tokens_are_never_allowed(kind: KIND) -> None:
    """They have no bytes; neither have the rows that pad an embedding table."""
    padded = Toolkit(Vocabulary((*TOKENS, *[b""] * 44), (EOS,)))
    row = torch.zeros(-(-300 // 32), dtype=torch.int32)
    padded.compile(GRAMMARS[kind]).matcher().fill(row)
    bits = [t for t in range(320) if int(row[t // 32]) >> t % 32 & 1]
    assert bits
    assert all(TOKENS[t] or t == EOS for t in bits)


@pytest.mark.parametrize("kind", KIND)
def test_dumped_and_loaded_it_is_the_same(kind: KIND) -> None:
    compiled = TOOLKIT.compile(GRAMMARS[kind])
    again = Toolkit(VOCABULARY).load(compiled.dump())
    start = {KIND.STRUCTURAL_TAG: b'<a>"', KIND.JSON_SCHEMA: b'{"na', KIND.REGEX: b"abc"}
    for output in (b"", start.get(kind, b"ab-c")):
        assert allowed(again, output) == allowed(compiled, output)
    assert again.nbytes > 0


@pytest.mark.parametrize(
    ("kind", "source", "said"),
    [
        (KIND.REGEX, "[a-", "Unclosed '['"),
        (KIND.REGEX, "(?=a)b", "Lookahead is not supported"),
        (KIND.EBNF, "root ::= foo", 'Rule "foo" is not defined'),
        (KIND.EBNF, "start ::= [a]", "root"),
        (KIND.JSON_SCHEMA, '{"type":"nope"}', 'Unsupported type "nope"'),
        (KIND.JSON_SCHEMA, '{"type":', "Failed to parse JSON"),
        (KIND.JSON_SCHEMA, '{"$ref":"#/$defs/zz"}', "$defs"),
        (KIND.STRUCTURAL_TAG, '{"type":"structural_tag"}', "must have a format field"),
        (KIND.REGEX, r"[^\u0000-\U0010ffff]", "allows no output at all"),
    ],
)
def test_a_bad_grammar_is_refused_with_what_is_wrong(kind: KIND, source: str, said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        TOOLKIT.compile(Grammar(kind, source))
    assert caught.value.field == "response_format"
    assert said in caught.value.message
    assert "/project/" not in caught.value.message
