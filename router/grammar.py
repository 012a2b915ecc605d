"""`response_format`: what the output must match.  Pure.

    {"type": "text"}                                            anything
    {"type": "json_object"}                                     any JSON object
    {"type": "json_schema", "json_schema": {"name", "schema"}}  JSON of this schema
    {"type": "structural_tag", "format": {…}}                   xgrammar's structural tags
    {"type": "regex", "regex": "…"}                             ours
    {"type": "ebnf", "ebnf": "…"}                               ours: GBNF, as in llama.cpp

The output always matches, "strict" or not.  As in OpenAI's strict mode, an object has no other
properties than its schema names, unless that has additionalProperties.
"""

import json
from typing import TypeGuard

from core.sampling import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from router.fields import Fields, bad, wrong

MAX_DEPTH = 64
MAX_NAME_CHARS = 64
_FIELD = "response_format"
_TYPES = ("text", "json_object", "json_schema", "structural_tag", "regex", "ebnf")


def parse_grammar(fields: Fields) -> Grammar | None:
    """fields: the request body.  Raises BadRequest naming the field."""
    raw = fields.get(_FIELD)
    if raw is None:
        return None
    form = Fields(raw, _FIELD)
    kind = form.required("type")
    match kind:
        case "text" | "json_object":
            form.only(("type",))
            found = None if kind == "text" else Grammar(GrammarKind.JSON_SCHEMA, "")
        case "json_schema":
            form.only(("type", "json_schema"))
            found = _schema(Fields(form.required("json_schema"), form.path("json_schema")))
        case "structural_tag":
            form.only(("type", "format"))
            _written(form.required("format"), form.path("format"))
            found = Grammar(GrammarKind.STRUCTURAL_TAG, _written(raw, _FIELD))
        case "regex" | "ebnf":
            form.only(("type", kind))
            found = Grammar(GrammarKind(kind), _source(form, kind))
        case _:
            raise bad(form.path("type"), f"must be one of {', '.join(_TYPES)}")
    if found is not None and fields.flag("ignore_eos"):
        raise bad("ignore_eos", f"cannot be true with a {_FIELD}, whose end ends the output")
    return found


def _schema(form: Fields) -> Grammar:
    form.only(("name", "description", "schema", "strict"))
    form.required("name")
    form.text("name", MAX_NAME_CHARS)
    form.text("description", MAX_GRAMMAR_BYTES)
    form.flag("strict")
    schema = form.get("schema")
    source = "" if schema is None else _written(schema, form.path("schema"))
    return Grammar(GrammarKind.JSON_SCHEMA, source)


def _source(form: Fields, name: str) -> str:
    form.required(name)
    source = form.text(name, MAX_GRAMMAR_BYTES)
    _check_size(source, form.path(name))
    return source


def _written(value: object, path: str) -> str:
    """An object as JSON.  The order of its properties is the order they are generated in."""
    if not isinstance(value, dict):
        raise wrong(path, "an object", value)
    if _deeper_than(value, MAX_DEPTH):
        raise bad(path, f"is nested more than {MAX_DEPTH} levels deep")
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    _check_size(text, path)
    return text


def _deeper_than(value: object, most: int) -> bool:
    level = [value]
    for _ in range(most):
        inside = (v.values() if isinstance(v, dict) else v for v in level if _nests(v))
        level = [child for children in inside for child in children if _nests(child)]
    return bool(level)


def _nests(value: object) -> TypeGuard[dict[str, object] | list[object]]:
    return isinstance(value, dict | list)


def _check_size(text: str, path: str) -> None:
    size = len(text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise bad(path, f"has {size} bytes of UTF-8; the most is {MAX_GRAMMAR_BYTES}")
