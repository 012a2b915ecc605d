"""What the HTTP edge is built from, handed in whole by whoever hosts it."""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from core.clock import Clock
from core.ports import Tokenizer
from core.spec import HttpSpec
from router.metrics import EdgeMetrics
from router.request import Generator


@dataclass(frozen=True, slots=True)
class ReadyState:
    """reason: why not; empty when ready."""

    ready: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EdgeContext:
    """ready: does a path through the workers exist?  status: JSON-able, for /status.

    clock: monotonic seconds, the one that the dispatcher's traces are kept in.
    new_id: a fresh unique id.  new_seed: a fresh seed in [0, 2**63) for a request without one.
    keep_alive_s: silence after which a stream gets a comment line.
    """

    generator: Generator
    tokenizer: Tokenizer
    model_name: str
    max_model_len: Callable[[], int]
    http: HttpSpec
    ready: Callable[[], Awaitable[ReadyState]]
    status: Callable[[], Mapping[str, object]]
    metrics: EdgeMetrics
    clock: Clock
    new_id: Callable[[], str]
    new_seed: Callable[[], int]
    unix_time: Callable[[], float] = time.time
    keep_alive_s: float = 10.0
