"""A model whose next token depends on all tokens before it; its plain loop is the oracle."""

from collections.abc import Sequence
from zlib import crc32

from core.messages import FinishReason
from core.sampling import Sampling, TokenLogprob, TokenLogprobs

EOS = 0
VOCABULARY = 61


def next_token(tokens: Sequence[int]) -> int:
    return crc32(repr(tuple(tokens)).encode()) % VOCABULARY


def verdict(sampling: Sampling, token: int, index: int) -> FinishReason | None:
    """Whether output token number `index` ends the generation."""
    if token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos):
        return FinishReason.STOP
    return FinishReason.LENGTH if index + 1 >= sampling.max_tokens else None


def told(sampling: Sampling, token: int) -> TokenLogprobs | None:
    """What a worker tells of a token's probability: something only this token has."""
    if sampling.logprobs is None:
        return None
    others = (TokenLogprob(token + i, -i - 1.0) for i in range(sampling.logprobs))
    return TokenLogprobs(-token / 8, tuple(others))


def plain(prompt: Sequence[int], sampling: Sampling) -> tuple[tuple[int, ...], FinishReason]:
    """What one forward loop on one machine puts out."""
    tokens = list(prompt)
    for index in range(sampling.max_tokens):
        tokens.append(next_token(tokens))
        finish = verdict(sampling, tokens[-1], index)
        if finish is not None:
            return tuple(tokens[len(prompt) :]), finish
    raise AssertionError("max_tokens is at least 1")
