"""Log probabilities in answers, in OpenAI's two shapes."""

from typing import Any

from core.messages import FinishReason
from core.sampling import TokenLogprob, TokenLogprobs
from router.logprobs import chat_logprobs, completion_logprobs
from router.streaming import TextToken
from tests.unit.edge_kit import (
    CHAT,
    COMPLETION,
    EOS,
    ByteTokenizer,
    chat,
    completion,
    events,
    make_edge,
    post,
    run,
    say,
)

spell = ByteTokenizer().token_bytes
NEVER = float("-inf")


def token(id: int, offset: int, *top: tuple[int, float], own: float = -0.5) -> TextToken:
    return TextToken(id, offset, TokenLogprobs(own, tuple(TokenLogprob(*t) for t in top)))


def test_chat_entries_have_text_bytes_and_alternatives() -> None:
    first, second = chat_logprobs(
        [token(104, 0, (104, -0.5), (0xE2, -1.0)), token(EOS, 1, own=NEVER)], spell
    )["content"]
    assert first == {
        "token": "h",
        "logprob": -0.5,
        "bytes": [104],
        "top_logprobs": [
            {"token": "h", "logprob": -0.5, "bytes": [104]},
            {"token": "bytes:\\xe2", "logprob": -1.0, "bytes": [0xE2]},
        ],
    }
    assert second == {"token": "", "logprob": -9999.0, "bytes": None, "top_logprobs": []}


def test_completion_entries_are_parallel_arrays() -> None:
    """The chosen token is among the alternatives even where it is none of the likeliest."""
    told = completion_logprobs(
        [token(104, 0, (105, -0.1), (106, NEVER)), token(0xE2, 1, (0xE2, -0.5))], spell
    )
    assert told == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -0.5],
        "tokens": ["h", "bytes:\\xe2"],
        "top_logprobs": [{"i": -0.1, "j": -9999.0, "h": -0.5}, {"bytes:\\xe2": -0.5}],
    }


def test_of_two_alternatives_with_one_spelling_the_likelier_is_told() -> None:
    told = completion_logprobs([token(104, 0, (256, -0.1), (300, -0.2))], spell)
    assert told["top_logprobs"] == [{"": -0.1, "h": -0.5}]


def streamed(body: dict[str, Any], path: str, steps: Any) -> list[Any]:
    edge, _ = make_edge(lambda request: steps)
    return [e["choices"][0] for e in events(run(post(edge, path, body | {"stream": True})))[:-1]]


def test_a_character_of_several_tokens_brings_all_their_entries_at_once() -> None:
    boat = "🚣".encode()
    choices = streamed(chat(logprobs=True), CHAT, say(b"a" + boat))
    shown = [(c["delta"].get("content"), c["logprobs"]) for c in choices]
    assert [text for text, _ in shown] == [None, "a", "🚣", None]
    assert [told and len(told["content"]) for _, told in shown] == [None, 1, 4, None]
    assert [e["bytes"] for e in shown[2][1]["content"]] == [[b] for b in boat]


def test_tokens_of_a_stop_string_and_the_end_token_have_their_entries_in_the_last_chunk() -> None:
    cut = streamed(completion(logprobs=0, stop="END"), COMPLETION, say("okEND"))
    assert [c["text"] for c in cut] == ["o", "k", ""]
    assert cut[-1]["logprobs"]["tokens"] == ["E", "N", "D"]
    assert cut[-1]["logprobs"]["text_offset"] == [2, 3, 4]
    ended = streamed(completion(logprobs=0), COMPLETION, [(104,), (EOS,), FinishReason.STOP])
    assert ended[-1]["logprobs"]["tokens"] == [""]


def test_nothing_is_told_unless_asked_for() -> None:
    edge, generator = make_edge()
    for path, body in ((CHAT, chat()), (COMPLETION, completion())):
        assert run(post(edge, path, body)).json()["choices"][0]["logprobs"] is None
    assert {g.request.sampling.logprobs for g in generator.started} == {None}
