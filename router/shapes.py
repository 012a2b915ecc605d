"""How the OpenAI API writes a choice, per endpoint, and what we add to it.  Pure."""

from collections.abc import Sequence
from typing import Protocol

from core.messages import FinishReason
from router.logprobs import TokenBytes, chat_logprobs, completion_logprobs
from router.request import Accounting
from router.schema_errors import Json
from router.stages import durations
from router.streaming import TextGeneration, TextToken


class Shape(Protocol):
    """`opening` starts a streamed choice, if the endpoint has such a chunk; `delta` with `finish`
    and no text ends it; `whole` is the choice of an answer that is not streamed."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> Json | None: ...
    def delta(self, index: int, text: str, finish: FinishReason | None) -> Json: ...
    def whole(self, index: int, text: str, finish: FinishReason) -> Json: ...
    def logprobs(self, tokens: Sequence[TextToken], spell: TokenBytes) -> Json: ...


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

    def logprobs(self, tokens: Sequence[TextToken], spell: TokenBytes) -> Json:
        return chat_logprobs(tokens, spell)


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

    def logprobs(self, tokens: Sequence[TextToken], spell: TokenBytes) -> Json:
        return completion_logprobs(tokens, spell)


def _choice(index: int, content: Json, finish: FinishReason | None) -> Json:
    return {"index": index, **content, "logprobs": None, "finish_reason": finish}


def usage(generations: Sequence[TextGeneration], n: int) -> Json:
    """Token counts over all choices, n to a prompt, which counts once; as cached count those of
    its tokens that no choice had to compute."""
    prompt = sum(len(g.request.tokens) for g in generations[::n])
    completion = sum(g.completion_tokens for g in generations)
    each = [g.accounting.cached_tokens for g in generations]
    cached = sum(min(each[i : i + n]) for i in range(0, len(each), n))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
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
        "lossy": list(accounting.lossy),
        "cached_tokens": accounting.cached_tokens,
        "seconds": durations(accounting.trace, arrived),
    }
