"""From a request body to what the dispatcher runs: everything that needs tokenizer and model.

Runs in a helper thread: a long prompt takes long to parse and tokenise.
"""

from dataclasses import dataclass, replace
from hashlib import blake2b

from core.errors import ModelNotFound
from core.ids import RequestId
from core.ports import Tokenizer
from core.sampling import BadWord, Sampling
from router.edge import EdgeContext
from router.fields import bad
from router.openai import Options, parse_chat, parse_completion
from router.request import Generate
from router.schema_errors import ContextLengthExceeded
from router.shapes import ChatShape, Shape, TextShape

_COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions when absent, as OpenAI has it; chat takes what room there is."""
_SEEDS = 1 << 63


@dataclass(frozen=True, slots=True)
class Job:
    """A request ready to run: requests[i] generates choice i, options.n of them per prompt."""

    id: str
    created: int
    options: Options
    shape: Shape
    requests: tuple[Generate, ...]


def prepare_chat(edge: EdgeContext, body: bytes) -> Job:
    """Raises BadRequest, ModelNotFound, ContextLengthExceeded."""
    request = parse_chat(body)
    check_model(edge, request.options.model)
    text = edge.tokenizer.render_chat([message._asdict() for message in request.messages])
    prompts = [("messages", _encode(edge, "messages", text))]
    return _job(edge, ChatShape(), request.options, prompts, edge.max_model_len())


def prepare_completion(edge: EdgeContext, body: bytes) -> Job:
    """Raises BadRequest, ModelNotFound, ContextLengthExceeded."""
    request = parse_completion(body)
    check_model(edge, request.options.model)
    prompts = [
        ("prompt", _encode(edge, "prompt", p) if isinstance(p, str) else p) for p in request.prompts
    ]
    return _job(edge, TextShape(), request.options, prompts, _COMPLETION_TOKENS)


def _encode(edge: EdgeContext, field: str, text: str) -> tuple[int, ...]:
    """Raises ContextLengthExceeded without reading a text that is too long in any case."""
    least = len(text) // edge.tokenizer.longest_token
    longest = edge.max_model_len()
    if least >= longest:
        raise ContextLengthExceeded(
            f"the prompt has {least} tokens at the very least and the model's context length is "
            f"{longest}; shorten the prompt",
            field=field,
        )
    return tuple(edge.tokenizer.encode(text))


def check_model(edge: EdgeContext, name: str) -> None:
    """Raises ModelNotFound naming what there is."""
    if name != edge.model_name:
        raise ModelNotFound(
            f"the model {name[:128]!r} does not exist; available: {edge.model_name}",
            field="model",
        )


def _job(
    edge: EdgeContext,
    shape: Shape,
    options: Options,
    prompts: list[tuple[str, tuple[int, ...]]],
    default: int,
) -> Job:
    job_id = shape.id_prefix + edge.new_id()
    asked, requests = _asked(edge.tokenizer, options), list[Generate]()
    for field, tokens in prompts:
        _check_ids(field, tokens, edge.tokenizer.vocab_size)
        most = _budget(field, len(tokens), options.max_tokens, default, edge.max_model_len())
        if asked.min_tokens > most:
            raise bad("min_tokens", f"= {asked.min_tokens} is more than max_tokens, {most}")
        seed = edge.new_seed() if options.seed is None else options.seed
        for choice in range(options.n):
            alone = len(prompts) * options.n == 1
            request_id = RequestId(job_id if alone else f"{job_id}-{len(requests)}")
            sampling = replace(asked, seed=choice_seed(seed, choice), max_tokens=most)
            requests.append(Generate(request_id, tokens, sampling, options.salt))
    return Job(job_id, int(edge.unix_time()), options, shape, tuple(requests))


def _asked(tokenizer: Tokenizer, options: Options) -> Sampling:
    """What all choices share: the body's parameters, checked against the vocabulary."""
    sampling = options.sampling
    _check_ids("stop_token_ids", sampling.stop_token_ids, tokenizer.vocab_size)
    biased = tuple(each.token for each in sampling.logit_bias)
    _check_ids("logit_bias", biased, tokenizer.vocab_size)
    return replace(sampling, bad_words=_bad_words(tokenizer, options.bad_words))


def _check_ids(field: str, ids: tuple[int, ...], vocab_size: int) -> None:
    largest = max(ids, default=0)
    if largest >= vocab_size:
        raise bad(field, f"has token id {largest}; the model's vocabulary ends at {vocab_size - 1}")


def choice_seed(seed: int, choice: int) -> int:
    """In [0, 2**63): a negative seed becomes its residue.  Choice 0 is what n = 1 would give."""
    if not choice:
        return seed % _SEEDS
    digest = blake2b(f"{seed}/{choice}".encode(), digest_size=8, person=b"trireme.choice").digest()
    return int.from_bytes(digest, "little") % _SEEDS


def _bad_words(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[BadWord, ...]:
    """Each as it is spelled at the beginning of a text and after a space, as in vLLM."""
    if not words:
        return ()
    start = len(tokenizer.encode(""))  # what the model puts before every text
    spelled = {
        tuple(tokenizer.encode(text)[start:]): None
        for word in words
        for text in (word.lstrip() or word, " " + (word.lstrip() or word))
    }
    return tuple(map(BadWord, spelled))


def _budget(field: str, prompt: int, asked: int | None, default: int, longest: int) -> int:
    """How many tokens may be generated after a prompt of `prompt` tokens."""
    if not prompt:
        raise bad(field, "must not be empty")
    room = longest - prompt
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {prompt} tokens and the model's context length is {longest}, which "
            "has to hold at least one token of output too; shorten the prompt",
            field=field,
        )
    if asked is not None and asked > room:
        raise ContextLengthExceeded(
            f"the model's context length is {longest} tokens; the prompt has {prompt} and "
            f"max_tokens asks for {asked}, together {prompt + asked}; shorten one of them",
            field="max_tokens",
        )
    return asked or min(default, room)
