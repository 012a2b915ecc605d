"""Untrusted bodies become requests or a BadRequest that names the field; never anything else."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import BadRequest
from core.sampling import LogitBias
from router.openai import (
    CHAT_REFUSED,
    COMPLETION_REFUSED,
    IGNORED,
    ChatMessage,
    parse_chat,
    parse_completion,
)
from router.sampling import SAMPLING_FIELDS
from tests.unit.edge_kit import chat, completion

BIG = 10**30


def raw(body: Any) -> bytes:
    return json.dumps(body).encode()


def test_defaults_are_openais() -> None:
    options = parse_chat(raw(chat())).options
    assert (options.sampling.temperature, options.sampling.top_p) == (1.0, 1.0)
    assert (options.seed, options.max_tokens, options.stops) == (None, None, ())
    flags = (options.stream, options.include_usage, options.return_trace)
    assert flags == (False, False, False)


def test_every_served_field_arrives() -> None:
    body = completion(
        temperature=0,
        top_p=0.5,
        top_k=7,
        seed=-3,
        max_tokens=9,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        ignore_eos=True,
        min_p=0.25,
        min_tokens=2,
        presence_penalty=-1,
        frequency_penalty=1.5,
        repetition_penalty=1.25,
        logit_bias={"5": -100, "17": 2.5},
        bad_words=["x", " y"],
        logprobs=3,
        n=4,
        best_of=4,
        stream=True,
        stream_options={"include_usage": True},
        cache_salt="tenant",
        return_token_ids=True,
        return_trace=True,
    )
    options = parse_completion(raw(body)).options
    sampling = options.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 7)
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((1, 2), True)
    assert (sampling.min_p, sampling.min_tokens, sampling.logprobs) == (0.25, 2, 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1.0, 1.5)
    assert sampling.repetition_penalty == 1.25
    assert sampling.logit_bias == (LogitBias(5, -100.0), LogitBias(17, 2.5))
    assert (options.bad_words, options.n) == (("x", " y"), 4)
    assert (options.seed, options.max_tokens, options.stops) == (-3, 9, ("a", "b"))
    assert (options.stream, options.include_usage, options.salt) == (True, True, "tenant")
    assert (options.return_token_ids, options.return_trace) == (True, True)


def test_null_is_absent_for_every_optional_field() -> None:
    optional = "temperature top_p top_k seed stop stop_token_ids ignore_eos max_tokens stream "
    optional += "stream_options cache_salt return_token_ids return_trace max_completion_tokens "
    optional += "n min_p min_tokens presence_penalty frequency_penalty repetition_penalty "
    optional += "logit_bias bad_words logprobs top_logprobs"
    body = chat(**dict.fromkeys(optional.split()))
    assert parse_chat(raw(body)) == parse_chat(raw(chat()))


def test_minus_one_and_zero_both_turn_top_k_off() -> None:
    assert {parse_chat(raw(chat(top_k=k))).options.sampling.top_k for k in (-1, 0)} == {0}


def test_roles_and_text_parts_are_flattened() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": t} for t in "xy"]},
        {"role": "assistant", "content": "z", "refusal": None, "tool_calls": [], "audio": None},
    ]
    parsed = parse_chat(raw(chat() | {"messages": messages})).messages
    assert parsed == (
        ChatMessage("system", "be brief"),
        ChatMessage("user", "xy"),
        ChatMessage("assistant", "z"),
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", ("hi",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_prompt_forms(prompt: Any, expected: Any) -> None:
    assert parse_completion(raw(completion(prompt))).prompts == expected


@pytest.mark.parametrize(
    "prompt",
    [
        *("", [], [""], ["a", 1], [1, "a"], [1, [2]], [[]], [[1], "a"], [True], [[True]], [1.5]),
        *([-1], {"a": 1}, 7, None, [[1], []], [BIG], ["a"] * 129),
    ],
    ids=repr,
)
def test_bad_prompts_are_named(prompt: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_completion(raw(completion(prompt)))
    assert caught.value.field.startswith("prompt")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", v) for v in (-0.1, 2.1, "1", True, BIG, -BIG, [], 1e999)),
        *(("top_p", v) for v in (0, 1.1, -1, False, "x")),
        *(("top_k", v) for v in (-2, 1.0, True, BIG)),
        *(("seed", v) for v in (1.5, True, 1 << 63, BIG, "7")),
        *(("max_tokens", v) for v in (0, -1, True, 5.0, BIG, "5")),
        *(("max_completion_tokens", v) for v in (0, True)),
        *(
            ("stop", v)
            for v in ("", [""], ["a", 1], ["a"] * 17, 5, {"a": 1}, "x" * 257, False, 0, {})
        ),
        *(("stop_token_ids", v) for v in ([True], [-1], "1", ["1"], [1] * 129)),
        *(("stream", v) for v in (1, "true")),
        *(("ignore_eos", v) for v in (0, "no")),
        *(("n", v) for v in (0, 129, True, 1.0, "2")),
        *(("min_p", v) for v in (-0.1, 1.1, True)),
        *(("min_tokens", v) for v in (-1, 1.0, BIG)),
        *(("presence_penalty", v) for v in (-2.1, 2.1, "1")),
        *(("frequency_penalty", v) for v in (-2.1, 2.1, True)),
        *(("repetition_penalty", v) for v in (0, -1, 11, "1")),
        *(("logit_bias", v) for v in ([], {"a": 1}, {"-1": 1}, {"1": 101}, {"1": "1"}, {"²": 1})),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        *(("bad_words", v) for v in ("a", [""], [1], ["a"] * 129, ["a" * 257])),
        *(("logprobs", v) for v in (1, "true")),
        *(("top_logprobs", v) for v in (-1, 21, 5, True)),
        *(("cache_salt", v) for v in (5, "x" * 257)),
        ("stream_options", {"include_usage": True}),
        *(("model", v) for v in (None, 5, ["a"])),
        *(("messages", v) for v in (None, [], "hi", {"role": "user"})),
    ],
    ids=lambda v: repr(v)[:20],
)
def test_bad_values_name_their_field(field: str, value: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_chat(raw(chat() | {field: value}).replace(b"Infinity", b"1e999"))
    assert caught.value.field.partition("[")[0] == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("hi", "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "x", "colour": 1}, "messages[0].colour"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls"),
    ],
    ids=repr,
)
def test_bad_messages_name_the_place(message: Any, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_chat(raw(chat() | {"messages": [message]}))
    assert caught.value.field == field


def test_stream_options_are_read_strictly() -> None:
    for options, field in (
        ({"include_usage": 1}, "stream_options.include_usage"),
        ({"include_usages": True}, "stream_options.include_usages"),
        ([], "stream_options"),
    ):
        with pytest.raises(BadRequest) as caught:
            parse_chat(raw(chat(stream=True, stream_options=options)))
        assert caught.value.field == field


def test_the_two_names_of_max_tokens_must_agree() -> None:
    same = parse_chat(raw(chat(max_tokens=5, max_completion_tokens=5)))
    assert same.options.max_tokens == 5
    assert parse_chat(raw(chat(max_completion_tokens=6))).options.max_tokens == 6
    with pytest.raises(BadRequest, match="differ"):
        parse_chat(raw(chat(max_tokens=5, max_completion_tokens=6)))


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_ignored_fields_change_nothing(name: str) -> None:
    assert parse_chat(raw(chat(**{name: {"a": [1]}}))) == parse_chat(raw(chat()))


@pytest.mark.parametrize("name", sorted(CHAT_REFUSED))
def test_fields_not_served_are_refused_by_name_unless_neutral(name: str) -> None:
    for neutral in (None, *CHAT_REFUSED[name]):
        parse_chat(raw(chat(**{name: neutral})))
    with pytest.raises(BadRequest, match=name) as caught:
        parse_chat(raw(chat(**{name: {"something": 1}})))
    assert caught.value.field == name


@pytest.mark.parametrize("name", sorted(COMPLETION_REFUSED))
def test_completion_fields_not_served_are_refused_by_name(name: str) -> None:
    for neutral in (None, *COMPLETION_REFUSED[name]):
        parse_completion(raw(completion(**{name: neutral})))
    with pytest.raises(BadRequest, match=name):
        parse_completion(raw(completion(**{name: 5})))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 7}, 7),
    ],
    ids=repr,
)
def test_chat_logprobs_are_a_flag_and_a_number(
    changes: dict[str, Any], expected: int | None
) -> None:
    assert parse_chat(raw(chat(**changes))).options.sampling.logprobs == expected


def test_best_of_can_only_return_all_it_makes() -> None:
    for n, best in ((None, 1), (3, 3)):
        parse_completion(raw(completion(n=n, best_of=best)))
    for n, best in ((None, 2), (3, 4)):
        with pytest.raises(BadRequest, match="must equal n") as caught:
            parse_completion(raw(completion(n=n, best_of=best)))
        assert caught.value.field == "best_of"


def test_prompts_times_choices_are_bounded() -> None:
    parse_completion(raw(completion(["a"] * 32, n=4)))
    with pytest.raises(BadRequest, match="n = 4 for each of 33 prompts") as caught:
        parse_completion(raw(completion(["a"] * 33, n=4)))
    assert caught.value.field == "n"


def test_a_boolean_is_not_a_neutral_number() -> None:
    with pytest.raises(BadRequest, match="logprobs must be an integer"):
        parse_completion(raw(completion(logprobs=True)))


def test_an_unknown_field_gets_a_suggestion() -> None:
    with pytest.raises(BadRequest, match="did you mean temperature") as caught:
        parse_chat(raw(chat(temprature=0.5)))
    assert caught.value.field == "temprature"
    with pytest.raises(BadRequest, match="did you mean max_tokens"):
        parse_completion(raw(completion(max_token=5)))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b'{"model": NaN}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda body: repr(body[:16]),
)
def test_what_is_no_json_object_is_a_bad_request(body: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(BadRequest):
            parse(body)


@pytest.mark.parametrize("place", ["prompt", "stop", "cache_salt", "model", "user"])
def test_a_lone_surrogate_is_refused_wherever_it_is(place: str) -> None:
    with pytest.raises(BadRequest, match="lone surrogate"):
        parse_completion(raw(completion() | {place: "x\ud800"}))
    paired = parse_completion(raw(completion() | {place: "x\U0001f6a3"}))
    assert paired.options.model


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
NAMES = st.sampled_from([*chat(), *completion(), *CHAT_REFUSED, *COMPLETION_REFUSED, "seed"])
MORE = st.sampled_from(["stop", "stream", "n", "best_of", "top_logprobs", *sorted(SAMPLING_FIELDS)])
CHANGES = st.dictionaries(NAMES | MORE, JSON)


@given(changes=CHANGES, base=st.sampled_from([chat(), completion(), {}]))
def test_any_json_is_parsed_or_refused(changes: dict[str, Any], base: dict[str, Any]) -> None:
    for parse in (parse_chat, parse_completion):
        with suppress(BadRequest):
            parse(raw(base | changes))


@given(body=st.binary(max_size=40))
def test_any_bytes_are_parsed_or_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_chat(body)
