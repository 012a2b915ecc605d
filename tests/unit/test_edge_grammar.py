"""`response_format`: what it may say, what becomes of it, and errors that name the field."""

import json
from typing import Any

import pytest

from core.errors import BadRequest
from core.sampling import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from router.grammar import MAX_DEPTH
from router.openai import parse_chat, parse_completion
from tests.unit.edge_kit import CHAT, chat, completion, make_edge, post, run

KIND = GrammarKind
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}, "required": ["b"]}
TAG = {"type": "structural_tag", "format": {"type": "regex", "pattern": "é+"}}


def json_schema(schema: Any = SCHEMA, **changes: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **changes}}


def grammar_of(form: Any) -> Grammar | None:
    body = json.dumps(chat(response_format=form)).encode()
    return parse_chat(body).options.sampling.grammar


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar(KIND.JSON_SCHEMA, "")),
        (json_schema(None), Grammar(KIND.JSON_SCHEMA, "")),
        ({"type": "regex", "regex": "[a-z]+"}, Grammar(KIND.REGEX, "[a-z]+")),
        ({"type": "ebnf", "ebnf": 'root ::= "é"'}, Grammar(KIND.EBNF, 'root ::= "é"')),
    ],
)
def test_every_kind_arrives(form: Any, expected: Grammar | None) -> None:
    assert grammar_of(form) == expected


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    found = grammar_of(json_schema(strict=True, description="d"))
    assert found is not None
    assert found.kind is KIND.JSON_SCHEMA
    assert list(json.loads(found.source)["properties"]) == ["b", "a"]


def test_a_structural_tag_is_passed_on_whole() -> None:
    found = grammar_of(TAG)
    assert found is not None
    assert (found.kind, json.loads(found.source)) == (KIND.STRUCTURAL_TAG, TAG)


def test_completions_have_it_too() -> None:
    body = completion(response_format={"type": "regex", "regex": "a"})
    sampling = parse_completion(json.dumps(body).encode()).options.sampling
    assert sampling.grammar == Grammar(KIND.REGEX, "a")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def test_nesting_and_size_have_a_limit() -> None:
    assert grammar_of(json_schema(nested(MAX_DEPTH)))
    assert grammar_of({"type": "regex", "regex": "a" * MAX_GRAMMAR_BYTES})


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ("text", ""),
        ({}, ".type"),
        ({"type": "yaml"}, ".type"),
        ({"type": ["text"]}, ".type"),
        ({"type": "text", "regex": "a"}, ".regex"),
        ({"type": "json_object", "schema": {}}, ".schema"),
        ({"type": "json_schema"}, ".json_schema"),
        ({"type": "json_schema", "json_schema": []}, ".json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, ".json_schema.name"),
        (json_schema(name="n" * 65), ".json_schema.name"),
        (json_schema(name=7), ".json_schema.name"),
        (json_schema(strict="yes"), ".json_schema.strict"),
        (json_schema(schma={}), ".json_schema.schma"),
        (json_schema("{}"), ".json_schema.schema"),
        (json_schema(nested(MAX_DEPTH + 1)), ".json_schema.schema"),
        (json_schema({"enum": ["é" * (MAX_GRAMMAR_BYTES // 2)]}), ".json_schema.schema"),
        ({"type": "structural_tag"}, ".format"),
        ({"type": "structural_tag", "format": "any_text"}, ".format"),
        ({"type": "structural_tag", "structures": [], "triggers": []}, ".structures"),
        ({"type": "regex"}, ".regex"),
        ({"type": "regex", "regex": {}}, ".regex"),
        ({"type": "regex", "regex": "a", "ebnf": "b"}, ".ebnf"),
        ({"type": "regex", "regex": "é" * (MAX_GRAMMAR_BYTES // 2 + 1)}, ".regex"),
        ({"type": "ebnf", "ebnf": "a" * (MAX_GRAMMAR_BYTES + 1)}, ".ebnf"),
    ],
)
def test_anything_else_is_refused_by_the_name_of_its_field(form: Any, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        grammar_of(form)
    assert caught.value.field == "response_format" + field
    assert caught.value.field in caught.value.message


def test_an_output_that_has_to_match_cannot_go_on_after_its_end() -> None:
    body = chat(response_format={"type": "json_object"}, ignore_eos=True)
    with pytest.raises(BadRequest) as caught:
        parse_chat(json.dumps(body).encode())
    assert caught.value.field == "ignore_eos"


def test_a_schema_that_is_too_large_is_an_answer_of_400() -> None:
    edge, generator = make_edge()
    form = json_schema({"enum": ["x" * MAX_GRAMMAR_BYTES]})
    answer = run(post(edge, CHAT, chat(response_format=form)))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format.json_schema.schema"
    assert not generator.started
