"""How the OpenAI API writes a choice, per endpoint, and what we add to it.  Pure."""

from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

from core.messages import FinishReason
from router.request import Accounting
from router.stages import durations
from router.streaming import TextGeneration

Json: TypeAlias = dict[str, Any]


class Shape(Protocol):
    """`opening` starts a streamed choice, if the endpoint has such a chunk; `delta` with `finish`
    and no text ends it; `whole` is the choice of an answer that is not streamed."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> Json | None: ...
    def delta(self, index: int, text: str, finish: FinishReason | None) -> Json: ...
    def whole(self, index: int, text: str, finish: FinishReason) -> Json: ...


class ChatShape:
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> Json | None:
        return _choice(index, {"delta": {"role": "assistant"}}, None)

    def delta(self, index: int, text: str, finish: FinishReason | None) -> Json:
        return _choice(index, {"delta": {"content": text} if text else {}}, finish)

    def whole(self, index: int, text: str, finish: FinishReason) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return _choice(index, {"message": message}, finish)


class TextShape:
    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, index: int) -> Json | None:
        return None

    def delta(self, index: int, text: str, finish: FinishReason | None) -> Json:
        return _choice(index, {"text": text}, finish)

    def whole(self, index: int, text: str, finish: FinishReason) -> Json:
        return _choice(index, {"text": text}, finish)


def _choice(index: int, content: Json, finish: FinishReason | None) -> Json:
    return {"index": index, **content, "logprobs": None, "finish_reason": finish}


def usage(generations: Iterable[TextGeneration]) -> Json:
    """Token counts over all choices."""
    done = list(generations)
    prompt = sum(len(g.request.tokens) for g in done)
    completion = sum(g.completion_tokens for g in done)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(g.accounting.cached_tokens for g in done)},
    }


def trace(accounting: Accounting, arrived: float) -> Json:
    """How one generation was served.  seconds: per stage; they sum to the whole."""
    return {
        "prefill_worker": accounting.prefill_worker,
        "decode_worker": accounting.decode_worker,
        "mover": accounting.mover,
        "moved_blocks": accounting.moved_blocks,
        "moved_bytes": accounting.moved_bytes,
        "attempts": accounting.attempts,
        "degraded": list(accounting.degraded),
        "cached_tokens": accounting.cached_tokens,
        "seconds": durations(accounting.trace, arrived),
    }
