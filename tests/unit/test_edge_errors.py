"""Every way to fail has its status, its shape and one end."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import Overloaded, TriremeError, Unavailable
from tests.unit.edge_kit import (
    CHAT,
    COMPLETION,
    MODEL,
    Step,
    chat,
    client_of,
    completion,
    events,
    get,
    lost,
    make_edge,
    post,
    run,
    streamed_text,
)


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry_after"),
    [
        (Overloaded("queue full; wait", retry_after_s=2.2), 429, "rate_limit_error", "3"),
        (Unavailable("no workers; wait"), 503, "server_error", "1"),
        (lost(), 502, "server_error", None),
    ],
    ids=["overloaded", "unavailable", "lost"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_has_its_own_status(
    error: TriremeError, status: int, kind: str, retry_after: str | None, stream: bool
) -> None:
    for script in (lambda request: error, lambda request: [error]):
        edge, _ = make_edge(script)
        answer = run(post(edge, CHAT, chat(stream=stream)))
        shown = answer.json()["error"]
        assert answer.status_code == status
        assert answer.headers.get("retry-after") == retry_after
        assert (shown["type"], shown["code"]) == (kind, error.code)
        assert (shown["stage"], shown["worker"]) == (error.stage, error.worker or None)
        assert shown["retryable"] is True


def test_an_error_after_the_first_token_is_the_last_event_of_the_stream() -> None:
    edge, generator = make_edge(lambda request: [(104,), lost()])
    answer = run(post(edge, CHAT, chat(stream=True)))
    assert answer.status_code == 200
    *chunks, end = events(answer)
    assert streamed_text(chunks) == "h"
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks)
    assert (end["error"]["code"], end["error"]["worker"]) == ("worker_lost", "d-1")
    assert generator.started[0].closes == 1


@pytest.mark.parametrize("steps", [[(104,), KeyError("x")], [(104,)]], ids=["bug", "no finish"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_broken_generation_is_one_internal_error(steps: list[Step], stream: bool) -> None:
    edge, _ = make_edge(lambda request: list(steps))
    answer = run(post(edge, CHAT, chat(stream=stream)))
    error = (events(answer)[-1] if stream else answer.json())["error"]
    assert error["code"] == "internal_error"
    assert answer.status_code == (200 if stream else 500)


def test_an_unknown_model_is_not_found_and_says_what_there_is() -> None:
    edge, _ = make_edge()
    for answer in (
        run(post(edge, CHAT, chat() | {"model": "gpt-5"})),
        get(edge, "/v1/models/gpt-5"),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "model_not_found")
        assert MODEL in error["message"]


def test_a_prompt_longer_than_the_model_names_both_numbers() -> None:
    edge, _ = make_edge(max_model_len=lambda: 10)
    error = run(post(edge, COMPLETION, completion("x" * 10))).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert error["message"].count("10") == 2
    error = run(post(edge, CHAT, chat("x" * 99))).json()["error"]
    assert error["param"] == "messages"


def test_a_text_that_is_far_too_long_is_refused_unread() -> None:
    edge, _ = make_edge(max_model_len=lambda: 10)
    reads = 0

    def encode(text: str) -> list[int]:
        nonlocal reads
        reads += 1
        return [1] * 99

    edge.tokenizer.encode = encode
    for path, body in ((COMPLETION, completion("x" * 400)), (CHAT, chat("x" * 400))):
        error = run(post(edge, path, body)).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "at the very least" in error["message"]
    assert reads == 0
    assert run(post(edge, COMPLETION, completion("x" * 39))).status_code == 400
    assert reads == 1


def test_asking_for_more_than_fits_is_an_error_and_not_asking_is_clipped() -> None:
    edge, generator = make_edge(max_model_len=lambda: 10)
    error = run(post(edge, COMPLETION, completion("x" * 8, max_tokens=3))).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert re.findall(r"\d+", error["message"]) == ["10", "8", "3", "11"]
    run(post(edge, COMPLETION, completion("x" * 8)))
    assert generator.started[0].request.sampling.max_tokens == 2


@pytest.mark.parametrize("field", ["prompt", "stop_token_ids"])
def test_token_ids_beyond_the_vocabulary_are_refused(field: str) -> None:
    edge, _ = make_edge()
    answer = run(post(edge, COMPLETION, completion() | {field: [257]}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_a_large_body_is_refused_from_its_header_alone() -> None:
    async def endless() -> Any:
        raise AssertionError("the body was read")
        yield b""

    async def ask(headers: dict[str, str], content: Any) -> Any:
        edge, _ = make_edge()
        async with client_of(edge) as client:
            return await client.post(CHAT, content=content, headers=headers)

    announced = run(ask({"content-length": "100001"}, endless()))
    assert (announced.status_code, announced.json()["error"]["code"]) == (413, "body_too_large")


def test_a_large_body_without_a_length_is_refused_at_the_limit() -> None:
    taken = 0

    async def chunks() -> Any:
        nonlocal taken
        for _ in range(100):
            taken += 1
            yield b"x" * 10_000

    async def ask() -> Any:
        edge, _ = make_edge()
        async with client_of(edge) as client:
            return await client.post(CHAT, content=chunks())

    assert run(ask()).status_code == 413
    assert taken <= 12


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [("/v1/nothing", "GET", 404), ("/v1/models/", "POST", 405), (CHAT, "GET", 405)],
)
def test_routing_errors_have_openais_shape(path: str, method: str, status: int) -> None:
    answer = get(make_edge()[0], path, method)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
FIELDS = "model prompt messages max_tokens stop seed stream n temperature stop_token_ids top_p x"


@settings(max_examples=80, deadline=None)
@given(
    changes=st.dictionaries(st.sampled_from(FIELDS.split()), JSON, max_size=3),
    base=st.sampled_from([chat(), completion(), {}]),
    path=st.sampled_from([CHAT, COMPLETION]),
)
def test_no_json_body_is_ever_an_internal_error(changes: Any, base: Any, path: str) -> None:
    edge, generator = make_edge()
    answer = run(post(edge, path, base | changes))
    assert answer.status_code in (200, 400, 404)
    assert ("error" in answer.text) is (answer.status_code != 200)
    assert all(g.closes == 1 for g in generator.started)
