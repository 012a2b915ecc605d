"""Streamed text, whole text and the plain definition of both are the same, however it is cut."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from core.messages import FinishReason
from router.detok import Detokenizer
from router.stops import StopMatcher
from tests.unit.edge_kit import (
    CHAT,
    COMPLETION,
    ByteTokenizer,
    chat,
    completion,
    events,
    make_edge,
    post,
    say,
    streamed_text,
)

# Few letters, so that stop strings do occur; some of two to four bytes.
LETTERS = "abé語🚣"
TEXTS = st.one_of(st.text(LETTERS, max_size=30), st.text(max_size=30))
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=4)
BYTES = st.one_of(TEXTS.map(str.encode), st.binary(max_size=30))


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The definition: the text up to where the leftmost stop string begins."""
    found = [at for at in map(text.find, stops) if at >= 0]
    return (text[: min(found)], True) if found else (text, False)


def pieces_of(items: Sequence[object], cuts: Sequence[int]) -> list[Sequence[object]]:
    edges = [0, *sorted(cut % (len(items) + 1) for cut in cuts), len(items)]
    return [items[a:b] for a, b in pairwise(edges)]


@given(raw=BYTES, cuts=st.lists(st.integers(0, 40), max_size=8))
def test_detokenised_batches_equal_the_bytes_decoded_at_once(raw: bytes, cuts: list[int]) -> None:
    detok = Detokenizer(ByteTokenizer())
    shown = [detok.push(ids) for ids in pieces_of(raw, cuts)] + [detok.finish()]
    assert "".join(shown) == raw.decode(errors="replace")


@given(text=TEXTS, cuts=st.lists(st.integers(0, 40), max_size=4))
def test_nothing_but_a_whole_character_is_ever_shown(text: str, cuts: list[int]) -> None:
    detok = Detokenizer(ByteTokenizer())
    shown = ""
    for ids in pieces_of(text.encode(), cuts):
        shown += detok.push(ids)
        assert text.startswith(shown)


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 40), max_size=8))
@example(text="abcd", stops=["abcd", "bc"], cuts=[1, 2, 3])
@example(text="abce", stops=["abcd", "bc"], cuts=[1, 2, 3])
@example(text="aab", stops=["ab"], cuts=[1, 2])
@example(text="ab", stops=["abc", "b"], cuts=[1])
def test_matcher_releases_exactly_the_text_before_the_leftmost_stop(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(stops)
    expected, hit = cut_at_stop(text, stops)
    shown = ""
    for piece in pieces_of(text, cuts):
        shown += matcher.push(piece)
        assert expected.startswith(shown)
    assert shown + matcher.finish() == expected
    assert matcher.hit is hit


@given(text=TEXTS, stops=STOPS)
def test_matcher_holds_back_only_what_could_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = matcher.push(text)
    held = text[len(shown) :]
    if not matcher.hit and held:
        assert any(stop.startswith(held) for stop in stops)


@settings(max_examples=60, deadline=None)
@given(raw=BYTES, stops=STOPS, size=st.integers(1, 7), is_chat=st.booleans())
def test_streamed_and_whole_answers_equal_the_definition(
    raw: bytes, stops: list[str], size: int, is_chat: bool
) -> None:
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    make_body = chat if is_chat else completion
    body = make_body(stop=stops, max_tokens=64)
    expected, hit = cut_at_stop(raw.decode(errors="replace"), stops)
    finish = "stop" if hit else "length"

    async def both() -> None:
        edge, generator = make_edge(lambda request: say(raw, size, FinishReason.LENGTH))
        usage = {"include_usage": True}
        whole = (await post(edge, path, body)).json()
        chunks = events(await post(edge, path, body | {"stream": True, "stream_options": usage}))
        choice = whole["choices"][0]
        assert (choice["message"]["content"] if is_chat else choice["text"]) == expected
        assert choice["finish_reason"] == finish
        assert streamed_text(chunks) == expected
        ends = [c["finish_reason"] for e in chunks[:-1] for c in e["choices"]]
        assert ends[-1] == finish
        assert not any(ends[:-1])
        assert chunks[-1] == "[DONE]"
        assert chunks[-2]["usage"] == whole["usage"]
        for e in chunks[:-2]:
            delta = e["choices"][0].get("delta", {})
            assert delta.get("content") != ""
        assert [g.closes for g in generator.started] == [1, 1]

    asyncio.run(both())


def entries(shown: Any) -> list[Any]:
    """`choice.logprobs` of either endpoint as one entry per token."""
    if shown is None:
        return []
    if "content" in shown:
        return shown["content"]
    return list(zip(*(shown[name] for name in sorted(shown)), strict=True))


@given(
    raw=BYTES,
    stops=STOPS,
    sizes=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    is_chat=st.booleans(),
    min_tokens=st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_every_token_delivered_has_one_logprob_whole_or_streamed(
    raw: bytes, stops: list[str], sizes: tuple[int, int], is_chat: bool, min_tokens: int
) -> None:
    path = CHAT if is_chat else COMPLETION
    asked = {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    body = (chat if is_chat else completion)(
        stop=stops, max_tokens=64, min_tokens=min_tokens, return_token_ids=True, **asked
    )

    async def answers(size: int) -> list[list[Any]]:
        edge, _ = make_edge(lambda request: say(raw, size, FinishReason.LENGTH))
        (choice,) = (await post(edge, path, body)).json()["choices"]
        chunks = events(await post(edge, path, body | {"stream": True}))[:-1]
        parts = [(c["token_ids"], entries(c["logprobs"])) for e in chunks for c in e["choices"]]
        assert all(len(ids) == len(told) for ids, told in parts)
        assert [i for ids, _ in parts for i in ids] == choice["token_ids"]
        whole = entries(choice["logprobs"])
        if is_chat:
            assert [b for entry in whole for b in entry["bytes"]] == choice["token_ids"]
        elif raw.decode(errors="ignore").encode() == raw:
            offsets = [len(raw[:i].decode(errors="ignore")) for i in range(len(whole))]
            assert [entry[0] for entry in whole] == offsets
        return [whole, [entry for _, told in parts for entry in told]]

    async def both() -> None:
        first, second = [await answers(size) for size in sizes]
        assert first[0] == first[1] == second[0] == second[1]

    asyncio.run(both())


@given(text=TEXTS, stops=STOPS.filter(bool), min_tokens=st.integers(0, 12))
@settings(max_examples=40, deadline=None)
def test_stop_strings_are_looked_for_after_min_tokens(
    text: str, stops: list[str], min_tokens: int
) -> None:
    raw = text.encode()
    free = raw[:min_tokens].decode(errors="ignore")
    expected = free + cut_at_stop(text[len(free) :], stops)[0]

    async def test() -> None:
        edge, _ = make_edge(lambda request: say(raw, 3))
        body = completion(stop=stops, max_tokens=64, min_tokens=min_tokens)
        assert (await post(edge, COMPLETION, body)).json()["choices"][0]["text"] == expected

    asyncio.run(test())


@given(raw=BYTES, stops=STOPS.filter(bool), sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)))
@settings(max_examples=40, deadline=None)
def test_usage_and_token_ids_do_not_depend_on_how_tokens_are_batched(
    raw: bytes, stops: list[str], sizes: tuple[int, int]
) -> None:
    async def answer(size: int) -> tuple[object, object]:
        edge, _ = make_edge(lambda request: say(raw, size))
        body = completion(stop=stops, return_token_ids=True)
        whole = (await post(edge, "/v1/completions", body)).json()
        ids = whole["choices"][0]["token_ids"]
        assert whole["usage"]["completion_tokens"] == len(ids)
        assert ids == list(raw[: len(ids)])
        chunks = events(await post(edge, "/v1/completions", body | {"stream": True}))
        assert [i for e in chunks[:-1] for i in e["choices"][0]["token_ids"]] == ids
        return whole["usage"], ids

    async def both() -> None:
        assert await answer(sizes[0]) == await answer(sizes[1])

    asyncio.run(both())
