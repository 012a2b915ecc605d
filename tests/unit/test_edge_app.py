"""Answers of the whole HTTP edge over a scripted generator."""

import asyncio

import pytest

from core.messages import FinishReason
from router.app import ReadyState
from router.request import Generate
from tests.unit.edge_kit import (
    CHAT,
    COMPLETION,
    EOS,
    MODEL,
    Scripted,
    Step,
    chat,
    completion,
    events,
    get,
    lost,
    make_edge,
    post,
    run,
    say,
    streamed_text,
)


def test_a_chat_answer_has_openais_shape() -> None:
    edge, generator = make_edge()
    answer = run(post(edge, CHAT, chat("hi", temperature=0, seed=5)))
    prompt = b"user: hi\nassistant:"
    assert answer.json() == {
        "id": "chatcmpl-id0",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": 5,
            "total_tokens": len(prompt) + 5,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    (started,) = generator.started
    assert started.request.tokens == tuple(prompt)
    assert started.request.sampling.seed == 5
    assert started.request.sampling.max_tokens == 200 - len(prompt)


def test_a_chat_stream_has_openais_chunks() -> None:
    edge, _ = make_edge(lambda request: say("hi"))
    body = chat(stream=True, stream_options={"include_usage": True})
    answer = run(post(edge, CHAT, body))
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, count, done = events(answer)
    assert {(c["id"], c["object"]) for c in chunks} == {("chatcmpl-id0", "chat.completion.chunk")}
    assert [c["choices"][0]["delta"] for c in chunks] == [
        {"role": "assistant"},
        {"content": "h"},
        {"content": "i"},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "stop"]
    assert all(c["usage"] is None for c in chunks)
    assert (count["choices"], count["usage"]["completion_tokens"]) == ([], 2)
    assert done == "[DONE]"


def test_usage_is_not_streamed_unless_asked_for() -> None:
    edge, _ = make_edge()
    assert not any("usage" in e for e in events(run(post(edge, CHAT, chat(stream=True)))))


def test_completions_default_to_sixteen_tokens_and_fresh_seeds() -> None:
    edge, generator = make_edge()
    run(post(edge, COMPLETION, completion(["a", "b"], seed=None)))
    samplings = [g.request.sampling for g in generator.started]
    assert [s.max_tokens for s in samplings] == [16, 16]
    assert [s.seed for s in samplings] == [1000, 1001]


def test_every_seed_reaches_workers_as_a_non_negative_int64() -> None:
    edge, generator = make_edge()
    for seed in (-1, -(1 << 63), (1 << 63) - 1):
        run(post(edge, COMPLETION, completion(seed=seed)))
    assert all(0 <= g.request.sampling.seed < 1 << 63 for g in generator.started)


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_become_indexed_choices(stream: bool) -> None:
    def twice(request: Generate) -> list[Step]:
        return say(bytes(request.tokens) * 2)

    edge, generator = make_edge(twice)
    answer = run(post(edge, COMPLETION, completion(["a", "c"], stream=stream)))
    if stream:
        chunks = events(answer)
        assert [streamed_text(chunks, i) for i in (0, 1)] == ["aa", "cc"]
        order = [c["choices"][0]["index"] for c in chunks[:-1]]
        assert sorted(order) != order, "not interleaved"
        assert chunks.count("[DONE]") == 1
    else:
        whole = answer.json()
        assert [(c["index"], c["text"]) for c in whole["choices"]] == [(0, "aa"), (1, "cc")]
        assert whole["usage"]["completion_tokens"] == 4
        assert whole["usage"]["prompt_tokens"] == 2
    assert [g.request.request_id for g in generator.started] == ["cmpl-id0-0", "cmpl-id0-1"]
    assert [g.closes for g in generator.started] == [1, 1]


def test_one_failing_prompt_fails_the_request_and_cancels_the_others() -> None:
    def script(request: Generate) -> list[Step]:
        return [(65,), lost()] if request.tokens == (97,) else [(66,), asyncio.Event()]

    edge, generator = make_edge(script)
    answer = run(post(edge, COMPLETION, completion(["a", "b"])))
    assert answer.status_code == 502
    assert [g.closes for g in generator.started] == [1, 1]


def test_a_stop_string_ends_and_cancels_the_generation() -> None:
    def script(request: Generate) -> list[Step]:
        return [*say("one END")[:-1], asyncio.Event()]

    edge, generator = make_edge(script)
    answer = run(post(edge, COMPLETION, completion(stop=" END"))).json()
    assert answer["choices"][0]["text"] == "one"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 7
    assert generator.started[0].closes == 1


def test_the_end_token_has_no_text_but_counts() -> None:
    edge, _ = make_edge(lambda request: [(104, EOS), FinishReason.STOP])
    answer = run(post(edge, COMPLETION, completion())).json()
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("h", 2)


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_and_trace_come_with_the_choice_when_asked_for(stream: bool) -> None:
    edge, _ = make_edge()
    body = completion(stream=stream, return_token_ids=True, return_trace=True)
    answer = run(post(edge, COMPLETION, body))
    if stream:
        choices = [e["choices"][0] for e in events(answer)[:-1]]
        ids = [token for c in choices for token in c["token_ids"]]
        last = choices[-1]
        assert not any("trireme" in c for c in choices[:-1])
    else:
        last = answer.json()["choices"][0]
        ids = last["token_ids"]
    assert bytes(ids) == b"hello"
    assert bytes(last["prompt_token_ids"]) == b"hi"
    assert (last["trireme"]["mover"], last["trireme"]["moved_bytes"]) == ("shm", 64)
    assert last["trireme"]["cached_tokens"] == 2
    assert last["trireme"]["seconds"] == {"edge": 0.25, "prefill": 0.5}


@pytest.mark.parametrize("stream", [False, True])
def test_a_lossy_answer_says_so_unasked(stream: bool) -> None:
    edge, generator = make_edge()
    start = generator.generate

    async def lossy(request: Generate) -> Scripted:
        generation = await start(request)
        generation.accounting.lossy.append("weights=int8")
        return generation

    generator.generate = lossy  # type: ignore[method-assign]
    answer = run(post(edge, CHAT, chat("hi", stream=stream)))
    last = events(answer)[-2] if stream else answer.json()
    assert last["choices"][0]["trireme"] == {"lossy": ["weights=int8"]}
    traced = run(post(edge, CHAT, chat("hi", return_trace=True))).json()
    assert traced["choices"][0]["trireme"]["lossy"] == ["weights=int8"]


def test_models_are_listed_and_found_by_name() -> None:
    edge, _ = make_edge()
    (model,) = get(edge, "/v1/models").json()["data"]
    assert (model["id"], model["object"]) == (MODEL, "model")
    assert get(edge, f"/v1/models/{MODEL}").json() == model


def test_the_content_type_does_not_matter() -> None:
    edge, _ = make_edge()
    body = b'{"model": "org/bytes", "prompt": "x"}'
    assert run(post(edge, COMPLETION, body)).status_code == 200


def test_readiness_says_why_not() -> None:
    async def no() -> ReadyState:
        return ReadyState(False, "no decode worker")

    assert get(make_edge()[0], "/readyz").status_code == 200
    answer = get(make_edge(ready=no)[0], "/readyz")
    assert (answer.status_code, answer.json()["reason"]) == (503, "no decode worker")
    assert get(make_edge(ready=no)[0], "/healthz").status_code == 200
    assert get(make_edge()[0], "/status").json() == {"workers": 2}


def test_a_readiness_check_that_hangs_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang() -> ReadyState:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr("router.status.READY_S", 0.01)
    assert get(make_edge(ready=hang)[0], "/readyz").status_code == 503
