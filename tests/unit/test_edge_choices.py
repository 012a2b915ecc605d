"""Several choices of one prompt: each its own generation, one answer, one end."""

import asyncio
from typing import Any

import pytest

from core.sampling import BadWord
from router.prepare import choice_seed
from router.request import Generate
from tests.unit.edge_kit import (
    CHAT,
    COMPLETION,
    ByteTokenizer,
    Step,
    chat,
    client_of,
    completion,
    events,
    lost,
    make_edge,
    post,
    run,
    say,
    streamed_text,
)

SEEDS = [choice_seed(7, i) for i in range(3)]


def by_seed(request: Generate) -> list[Step]:
    """Each choice its own length."""
    return say("abc"[SEEDS.index(request.sampling.seed)] * 3)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETION], ids=["chat", "completion"])
def test_choices_are_generations_of_their_own_with_seeds_of_their_own(
    path: str, stream: bool
) -> None:
    edge, generator = make_edge(by_seed)
    body = (chat if path == CHAT else completion)(n=3, seed=7, stream=stream)
    answer = run(
        post(edge, path, body | ({"stream_options": {"include_usage": True}} if stream else {}))
    )
    prompt = len(generator.started[0].request.tokens)
    if stream:
        *chunks, last, done = events(answer)
        assert [streamed_text(chunks, i) for i in range(3)] == ["aaa", "bbb", "ccc"]
        order = [c["choices"][0]["index"] for c in chunks]
        assert sorted(order) != order, "not interleaved"
        ends = [c["choices"][0] for c in chunks if c["choices"][0]["finish_reason"]]
        assert sorted(c["index"] for c in ends) == [0, 1, 2]
        assert done == "[DONE]"
        usage = last["usage"]
    else:
        whole = answer.json()
        texts = [c["message"]["content"] if path == CHAT else c["text"] for c in whole["choices"]]
        assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
        assert texts == ["aaa", "bbb", "ccc"]
        usage = whole["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 9)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert len({g.request.request_id for g in generator.started}) == 3
    assert [g.closes for g in generator.started] == [1, 1, 1]


def test_cached_are_the_prompt_tokens_that_no_choice_had_to_compute() -> None:
    edge, generator = make_edge(lambda request: say("x"))

    async def generate(request: Generate) -> Any:
        made = await original(request)
        made.accounting.cached_tokens = len(generator.started)
        return made

    original, generator.generate = generator.generate, generate  # type: ignore[method-assign]
    usage = run(post(edge, COMPLETION, completion(["aaaa", "bbbbbb"], n=2))).json()["usage"]
    assert usage["prompt_tokens"] == 10
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1 + 3}


def test_choices_come_prompt_by_prompt() -> None:
    edge, generator = make_edge(lambda request: say(bytes(request.tokens)))
    whole = run(post(edge, COMPLETION, completion(["a", "b"], n=2))).json()
    assert [(c["index"], c["text"]) for c in whole["choices"]] == list(enumerate("aabb"))
    seeds = [g.request.sampling.seed for g in generator.started]
    assert seeds == [choice_seed(s, i) for s in (1000, 1001) for i in range(2)]


def test_the_first_choice_is_what_one_alone_would_be_and_no_two_are_alike() -> None:
    for seed in (0, 7, -1, -(1 << 63), (1 << 63) - 1):
        seeds = [choice_seed(seed, i) for i in range(128)]
        assert seeds[0] == seed % (1 << 63)
        assert len(set(seeds)) == 128
        assert all(0 <= s < 1 << 63 for s in seeds)
    assert choice_seed(7, 1) == 2800789055389179294, "a seed gives the same answer for ever"


@pytest.mark.parametrize("stream", [False, True])
def test_one_failing_choice_fails_the_answer_once_and_cancels_the_others(stream: bool) -> None:
    def script(request: Generate) -> list[Step]:
        failing = request.sampling.seed == SEEDS[1]
        return [(65,), lost()] if failing else [(66,), asyncio.Event()]

    edge, generator = make_edge(script)
    answer = run(post(edge, CHAT, chat(n=3, seed=7, stream=stream)))
    if stream:
        errors = [e for e in events(answer) if e == "[DONE]" or "error" in e]
        assert [e["error"]["stage"] for e in errors] == ["decode"]
    else:
        assert (answer.status_code, answer.json()["error"]["stage"]) == (502, "decode")
    assert [g.closes for g in generator.started] == [1, 1, 1]


def test_a_client_that_leaves_cancels_every_choice() -> None:
    edge, generator = make_edge(lambda request: [(66,), asyncio.Event()])

    async def test() -> None:
        async with client_of(edge) as client:
            call = asyncio.ensure_future(client.post(CHAT, json=chat(n=3, stream=True)))
            for _ in range(500):
                if len(generator.started) == 3 and not any(g.steps for g in generator.started):
                    break
                await asyncio.sleep(0.01)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    run(test())
    assert [g.closes for g in generator.started] == [1, 1, 1]


def test_bad_words_are_spelled_with_and_without_a_space_before() -> None:
    class Starting(ByteTokenizer):
        """Puts its first token before every text."""

        def encode(self, text: str) -> list[int]:
            return [1, *text.encode()]

    for tokenizer in (ByteTokenizer(), Starting()):
        edge, generator = make_edge(tokenizer=tokenizer)
        run(post(edge, COMPLETION, completion(bad_words=["ab", " c", "\n"])))
        words = [bytes(w.token_ids) for w in generator.started[0].request.sampling.bad_words]
        assert words == [b"ab", b" ab", b"c", b" c", b"\n", b" \n"]
        assert all(isinstance(w, BadWord) for w in generator.started[0].request.sampling.bad_words)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"logit_bias": {"257": 1}}, "logit_bias"),
        ({"stop_token_ids": [257]}, "stop_token_ids"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
    ],
    ids=repr,
)
def test_what_only_the_model_can_tell_is_refused_by_name(
    changes: dict[str, Any], field: str
) -> None:
    edge, generator = make_edge()
    answer = run(post(edge, COMPLETION, completion(**changes)))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert generator.started == []
