"""Errors in the shape the OpenAI API gives them.  Pure.

{"error": {"message", "type", "param", "code"}} is OpenAI's; "stage", "worker" and "retryable" say
where it happened and whether another try makes sense.
"""

import json
import math
from typing import Any, TypeAlias

from core.errors import BadRequest, InternalError, TriremeError

Json: TypeAlias = dict[str, Any]


class ContextLengthExceeded(BadRequest):
    """Prompt, or prompt and asked output, are longer than the model allows."""

    code = "context_length_exceeded"


def error_body(error: TriremeError) -> Json:
    return {
        "error": {
            "message": error.message,
            "type": _kind(error.status),
            "param": error.field or None,
            "code": error.code,
            "stage": str(error.stage),
            "worker": error.worker or None,
            "retryable": error.retryable,
        }
    }


def error_headers(error: TriremeError) -> dict[str, str]:
    """Retry-After, in whole seconds, wherever a client had better wait."""
    if error.status not in (429, 503):
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}


def http_error_body(status: int, what: str) -> Json:
    """For what no route answers; `what` is method and path."""
    why = "does not allow this method" if status == 405 else "is not here"
    message = f"{what} {why}; see /v1/models, /v1/chat/completions, /v1/completions"
    shown = {"message": message, "type": _kind(status), "param": None, "code": None}
    return {"error": shown}


def internal() -> InternalError:
    """What a client may know of an unexpected exception; the log has the rest."""
    return InternalError("unexpected error; the server's log says more, please report it")


def dumps(value: object) -> bytes:
    """Compact JSON.  ASCII, so that any text a client sent can be quoted back."""
    return json.dumps(value, separators=(",", ":")).encode()


def _kind(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
