"""Sampling parameters that a worker can follow.  The edge refuses bad ones with better words; a
worker checks what it is sent, for one bad number or id would take a whole step down with it."""

from collections.abc import Iterable

from core.sampling import Sampling
from engine.policy.config import SchedulerConfig

_LARGE = 1e4
"""Beyond it, and below its inverse, float32 logits stop being numbers."""


def objection(sampling: Sampling, config: SchedulerConfig) -> tuple[str, str] | None:
    """(field, why) of the first parameter that cannot be followed; None: all can."""
    for field, value, low, high in _ranges(sampling, config):
        if not low <= value <= high:
            return field, f"{field} = {value} is not within {low:g} and {high:g}"
    if not all(word.token_ids for word in sampling.bad_words):
        return "bad_words", "bad_words has a word of no tokens"
    for field, ids in _ids(sampling):
        if not all(0 <= token < config.vocab_size for token in ids):
            return field, f"{field}: token ids must be 0 to {config.vocab_size - 1}, not all are"
    return None


def _ranges(
    sampling: Sampling, config: SchedulerConfig
) -> Iterable[tuple[str, float, float, float]]:
    """(field, value, lowest, highest)."""
    yield "temperature", sampling.temperature, 0, _LARGE
    yield "top_p", sampling.top_p, 0, 1
    yield "min_p", sampling.min_p, 0, 1
    yield "min_tokens", sampling.min_tokens, 0, sampling.max_tokens
    yield "repetition_penalty", sampling.repetition_penalty, 1 / _LARGE, _LARGE
    yield "presence_penalty", sampling.presence_penalty, -_LARGE, _LARGE
    yield "frequency_penalty", sampling.frequency_penalty, -_LARGE, _LARGE
    yield "logprobs", sampling.logprobs or 0, 0, config.vocab_size
    yield from (("logit_bias", each.bias, -_LARGE, _LARGE) for each in sampling.logit_bias)


def _ids(sampling: Sampling) -> Iterable[tuple[str, Iterable[int]]]:
    yield "stop_token_ids", sampling.stop_token_ids
    yield "logit_bias", (each.token for each in sampling.logit_bias)
    yield from (("bad_words", word.token_ids) for word in sampling.bad_words)
