"""Log probabilities of tokens as the OpenAI API writes them.  Pure.

Exactly one entry for each token that was delivered, in order, whether or not it has text.  A
token that is not UTF-8 by itself is spelled by its bytes, a special token has none.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from router.schema_errors import Json
from router.streaming import TextToken

TokenBytes: TypeAlias = Callable[[int], bytes]

_LEAST = -9999.0
"""OpenAI's word for "next to impossible"; JSON has none for minus infinity."""


def chat_logprobs(tokens: Sequence[TextToken], spell: TokenBytes) -> Json:
    """`choice.logprobs` of chat completions."""
    content = []
    for token in tokens:
        own, top = _told(token)
        others = [_entry(other, logprob, spell) for other, logprob in top]
        content.append(_entry(token.id, own, spell) | {"top_logprobs": others})
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[TextToken], spell: TokenBytes) -> Json:
    """`choice.logprobs` of completions: parallel arrays; each `top_logprobs` has the chosen token
    too.  Offsets count from the beginning of the choice's text."""
    told = [_told(token) for token in tokens]
    names = [_name(spell(token.id)) for token in tokens]
    tops = []
    for name, (own, top) in zip(names, told, strict=True):
        found: dict[str, float] = {}
        for other, logprob in top:
            found.setdefault(_name(spell(other)), logprob)
        found.setdefault(name, own)
        tops.append(found)
    return {
        "text_offset": [token.offset for token in tokens],
        "token_logprobs": [own for own, _ in told],
        "tokens": names,
        "top_logprobs": tops,
    }


def _told(token: TextToken) -> tuple[float, list[tuple[int, float]]]:
    """Its own log probability, and the likeliest tokens with theirs."""
    assert token.logprobs is not None, "the output takes no token without what was asked for"
    own, top = token.logprobs.logprob, token.logprobs.top
    return max(own, _LEAST), [(other.token, max(other.logprob, _LEAST)) for other in top]


def _entry(token: int, logprob: float, spell: TokenBytes) -> Json:
    raw = spell(token)
    return {"token": _name(raw), "logprob": logprob, "bytes": list(raw) or None}


def _name(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
