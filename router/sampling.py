"""The fields of a request body that say how tokens are chosen.  Pure.

Ours, beyond OpenAI's and named as in vLLM: top_k, min_p, min_tokens, repetition_penalty,
bad_words, stop_token_ids, ignore_eos.
"""

from core.sampling import LogitBias, Sampling
from router.fields import Fields, bad, integer, number
from router.grammar import parse_grammar

MAX_STOP_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_BIASES = 1024
MAX_LOGPROBS = 20
INT32 = (1 << 31) - 1

SAMPLING_FIELDS = frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "min_tokens", "stop_token_ids", "ignore_eos"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words"),
        *("seed", "logprobs", "response_format"),
    )
)


def sampling_of(fields: Fields, logprobs: int | None) -> Sampling:
    """All but the seed, max_tokens and bad words, which need more than the body.

    Raises BadRequest naming the field.
    """
    top_p = fields.number("top_p", 1.0, 0.0, 1.0)
    if not top_p:
        raise bad("top_p", "must be above 0; send temperature 0 for greedy decoding")
    return Sampling(
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=top_p,
        top_k=max(0, fields.integer("top_k", 0, -1, INT32)),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        min_tokens=fields.integer("min_tokens", 0, 0, INT32),
        stop_token_ids=tuple(
            integer(value, f"stop_token_ids[{i}]", 0, INT32)
            for i, value in enumerate(fields.array("stop_token_ids", MAX_STOP_IDS))
        ),
        ignore_eos=fields.flag("ignore_eos"),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 10.0),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        logit_bias=_biases(fields),
        logprobs=logprobs,
        grammar=parse_grammar(fields),
    )


def chat_logprobs(fields: Fields) -> int | None:
    """How many alternatives to tell of; None: no log probabilities at all."""
    most = fields.integer("top_logprobs", None, 0, MAX_LOGPROBS)
    if fields.flag("logprobs"):
        return most or 0
    if most is not None:
        raise bad("top_logprobs", "needs logprobs = true")
    return None


def completion_logprobs(fields: Fields) -> int | None:
    return fields.integer("logprobs", None, 0, MAX_LOGPROBS)


def bad_words_of(fields: Fields) -> tuple[str, ...]:
    words = []
    for i, word in enumerate(fields.array("bad_words", MAX_BAD_WORDS)):
        if not isinstance(word, str) or not 0 < len(word) <= MAX_BAD_WORD_CHARS:
            raise bad(
                f"bad_words[{i}]", f"must be a string of 1 to {MAX_BAD_WORD_CHARS} characters"
            )
        words.append(word)
    return tuple(words)


def _biases(fields: Fields) -> tuple[LogitBias, ...]:
    raw = fields.mapping("logit_bias", MAX_BIASES)
    return tuple(
        LogitBias(_token(key), number(value, f"logit_bias[{key[:10]}]", -100.0, 100.0))
        for key, value in raw.items()
    )


def _token(key: str) -> int:
    """JSON has only strings for keys."""
    if not (key.isascii() and key.isdecimal() and len(key) <= 10):
        raise bad("logit_bias", f'has the key {key[:32]!r}; keys must be token ids, such as "50"')
    return int(key)
