"""HTTP calls to a running cluster: the first-token probe and /status.  Standard library."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from core.errors import DeadlineExceeded, Stage, Unavailable

RETRY_S = 0.25
CALL_S = 30.0


def base_url(host: str, port: int) -> str:
    """Where a client on this machine reaches a server that listens on host:port."""
    here = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    return f"http://{here}:{port}"


def get_json(url: str, timeout_s: float = CALL_S) -> Any:
    """Raises Unavailable with the server's words."""
    return _call(urllib.request.Request(url), timeout_s)


def post_json(url: str, body: Mapping[str, object]) -> Any:
    """Raises Unavailable with the server's words."""
    headers = {"Content-Type": "application/json"}
    data = json.dumps(dict(body)).encode()
    return _call(urllib.request.Request(url, data, headers), CALL_S)


def first_token(url: str, timeout_s: float) -> str:
    """Ask for one token until it comes, so that "ready" means the whole path works.

    Returns the model's name.  Raises DeadlineExceeded with the last refusal.
    """
    end = time.monotonic() + timeout_s
    while True:
        try:
            model = str(get_json(f"{url}/v1/models")["data"][0]["id"])
            post_json(f"{url}/v1/completions", {"model": model, "prompt": "Hello", "max_tokens": 1})
            return model
        except Unavailable as error:
            if time.monotonic() >= end:
                raise DeadlineExceeded(
                    f"no token within {timeout_s:g} s; last answer: {error.message}",
                    stage=Stage.START,
                ) from error
            time.sleep(RETRY_S)


def _call(request: urllib.request.Request, timeout_s: float) -> Any:
    # No proxy: the cluster is on this machine, whatever the environment says.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        text = error.read(2000).decode(errors="replace")
        reason = f"{error.code} {HTTPStatus(error.code).phrase}: {text}"
        raise Unavailable(f"{request.full_url} answered {reason}", stage=Stage.START) from None
    except OSError as error:  # refused, reset, timed out; URLError is one
        why = getattr(error, "reason", error)
        raise Unavailable(f"{request.full_url}: {why}", stage=Stage.START) from None
    except ValueError:
        raise Unavailable(f"{request.full_url} did not answer JSON", stage=Stage.START) from None
