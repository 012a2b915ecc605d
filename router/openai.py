"""OpenAI request bodies, parsed once: untrusted JSON in, frozen requests out.  Pure.

The only place that sees a client's JSON; nothing further in checks these values again, except
for what needs the tokenizer or the model (`router.prepare`).

Ours, beyond OpenAI's and those of `router.sampling`: cache_salt, return_token_ids, return_trace.
IGNORED fields may say anything.  REFUSED fields are OpenAI's that we do not serve: only values
that ask for nothing are accepted.  Any other field is an error.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from core.errors import BadRequest
from core.sampling import Sampling
from router.fields import Fields, array, bad, integer, wrong
from router.sampling import (
    INT32,
    SAMPLING_FIELDS,
    bad_words_of,
    chat_logprobs,
    completion_logprobs,
    sampling_of,
)

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_CHOICES = 128
MAX_SALT_CHARS = 256
_INT64 = (1 << 63) - 1

IGNORED = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
)
_COMMON = (
    IGNORED
    | SAMPLING_FIELDS
    | {
        *("model", "n", "stop", "max_tokens", "stream", "stream_options"),
        *("cache_salt", "return_token_ids", "return_trace"),
    }
)
CHAT_REFUSED: Mapping[str, Sequence[object]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
COMPLETION_REFUSED: Mapping[str, Sequence[object]] = {
    "echo": (False,),
    "suffix": ("",),
}
CHAT_FIELDS = _COMMON | {"messages", "max_completion_tokens", "top_logprobs"} | CHAT_REFUSED.keys()
COMPLETION_FIELDS = _COMMON | {"prompt", "best_of"} | COMPLETION_REFUSED.keys()

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_MESSAGE_REFUSED: Mapping[str, Sequence[object]] = {
    "tool_calls": ([],),
    "annotations": ([],),
    **dict.fromkeys(("function_call", "refusal", "audio", "reasoning_content"), ()),
}
_MESSAGE = {"role", "content", "name"} | _MESSAGE_REFUSED.keys()


class ChatMessage(NamedTuple):
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Options:
    """What both endpoints share.  sampling lacks its seed, max_tokens and bad words: they are
    here as the client gave them, None where it left the choice to us.  n: choices per prompt."""

    model: str
    sampling: Sampling
    bad_words: tuple[str, ...]
    n: int
    seed: int | None
    max_tokens: int | None
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    salt: str
    return_token_ids: bool
    return_trace: bool


@dataclass(frozen=True, slots=True)
class ChatRequest:
    options: Options
    messages: tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """prompts: each a text or token ids; at least one, none of them empty."""

    options: Options
    prompts: tuple[str | tuple[int, ...], ...]


def parse_chat(body: bytes) -> ChatRequest:
    """Raises BadRequest naming the field."""
    fields = Fields(decode(body))
    fields.only(CHAT_FIELDS)
    fields.refuse(CHAT_REFUSED)
    messages = array(fields.required("messages"), "messages", INT32)
    if not messages:
        raise bad("messages", "must have at least one message")
    longest = fields.integer("max_tokens", None, 1, INT32)
    completion = fields.integer("max_completion_tokens", longest, 1, INT32)
    if longest not in (None, completion):
        raise bad("max_tokens", "and max_completion_tokens differ; send one of them")
    parsed = (_message(Fields(m, f"messages[{i}]")) for i, m in enumerate(messages))
    options = _options(fields, completion, chat_logprobs(fields))
    return ChatRequest(options, tuple(parsed))


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises BadRequest naming the field."""
    fields = Fields(decode(body))
    fields.only(COMPLETION_FIELDS)
    fields.refuse(COMPLETION_REFUSED)
    prompts = _prompts(fields.required("prompt"))
    max_tokens = fields.integer("max_tokens", None, 1, INT32)
    options = _options(fields, max_tokens, completion_logprobs(fields))
    if fields.integer("best_of", options.n, 1, MAX_CHOICES) != options.n:
        raise bad("best_of", f"must equal n, which is {options.n}; every choice is returned")
    if len(prompts) * options.n > MAX_CHOICES:
        raise bad("n", f"= {options.n} for each of {len(prompts)} prompts exceeds {MAX_CHOICES}")
    return CompletionRequest(options, prompts)


def decode(body: bytes) -> object:
    """JSON in UTF-8, whatever the Content-Type says.  Raises BadRequest.

    Strings with lone surrogates are no text, can be neither tokenised nor answered: refused
    here, once for every string of the body.
    """
    try:
        text = body.decode()
        value: object = json.loads(text, parse_constant=_no_constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise BadRequest("the body is JSON that is nested too deeply") from None
    except UnicodeEncodeError:
        raise BadRequest("the body has a lone surrogate (\\ud800 to \\udfff)") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON in UTF-8: {error}") from None
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _options(fields: Fields, max_tokens: int | None, logprobs: int | None) -> Options:
    model = fields.required("model")
    if not isinstance(model, str):
        raise wrong("model", "a string", model)
    stream = fields.flag("stream")
    return Options(
        model=model,
        sampling=sampling_of(fields, logprobs),
        bad_words=bad_words_of(fields),
        n=fields.integer("n", 1, 1, MAX_CHOICES),
        seed=fields.integer("seed", None, -_INT64 - 1, _INT64),
        max_tokens=max_tokens,
        stops=_stops(fields.get("stop")),
        stream=stream,
        include_usage=_include_usage(fields.get("stream_options"), stream),
        salt=fields.text("cache_salt", MAX_SALT_CHARS),
        return_token_ids=fields.flag("return_token_ids"),
        return_trace=fields.flag("return_trace"),
    )


def _include_usage(raw: object, stream: bool) -> bool:
    if raw is None:
        return False
    if not stream:
        raise bad("stream_options", "is only for requests with stream = true")
    fields = Fields(raw, "stream_options")
    fields.only(("include_usage", "include_obfuscation"))
    fields.flag("include_obfuscation")
    return fields.flag("include_usage")


def _stops(raw: object) -> tuple[str, ...]:
    values = [raw] if isinstance(raw, str) else array([] if raw is None else raw, "stop", MAX_STOPS)
    stops = []
    for stop in values:
        if not isinstance(stop, str):
            raise wrong("stop", "a string or an array of strings", stop)
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise bad("stop", f"strings must have 1 to {MAX_STOP_CHARS} characters")
        stops.append(stop)
    return tuple(stops)


def _message(fields: Fields) -> ChatMessage:
    fields.only(_MESSAGE)
    fields.refuse(_MESSAGE_REFUSED)
    role = fields.required("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad(fields.path("role"), f"must be one of {', '.join(_ROLES)}")
    content = fields.required("content")
    if isinstance(content, str):
        return ChatMessage(_ROLES[role], content)
    path = fields.path("content")
    if not isinstance(content, list):
        raise wrong(path, "a string or an array of text parts", content)
    parts = (_part(Fields(part, f"{path}[{i}]")) for i, part in enumerate(content))
    return ChatMessage(_ROLES[role], "".join(parts))


def _part(fields: Fields) -> str:
    if fields.required("type") != "text":
        raise bad(fields.path("type"), "must be text; no other kind of content is served")
    fields.only(("type", "text"))
    text = fields.required("text")
    if not isinstance(text, str):
        raise wrong(fields.path("text"), "a string", text)
    return text


def _prompts(raw: object) -> tuple[str | tuple[int, ...], ...]:
    """A text, texts, token ids, or arrays of token ids; one kind, not mixed."""
    if isinstance(raw, str):
        return (_text(raw),)
    items = array(raw, "prompt", INT32)
    if items and type(items[0]) is int:
        return (_ids(items, "prompt"),)
    if not items or len(items) > MAX_CHOICES:
        raise bad("prompt", f"must be one to {MAX_CHOICES} prompts, not {len(items)}")
    if all(isinstance(item, str) for item in items):
        return tuple(_text(item) for item in items)
    return tuple(_ids(item, f"prompt[{i}]") for i, item in enumerate(items))


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise bad("prompt", "must not be empty")
    return value


def _ids(value: object, path: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise wrong(path, "a string, or a non-empty array of token ids", value)
    return tuple(integer(item, path, 0, INT32) for item in value)
