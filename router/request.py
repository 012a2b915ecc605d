"""A generation as the router knows it, between the HTTP edge and the dispatcher."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from core.ids import RequestId, WorkerId
from core.messages import FinishReason
from core.sampling import Sampling, TokenLogprobs
from core.trace import Trace


@dataclass(frozen=True, slots=True)
class Generate:
    """A parsed, tokenised request.  salt: cache salt scope, "" shares with everybody."""

    request_id: RequestId
    tokens: tuple[int, ...]
    sampling: Sampling
    salt: str = ""


class Token(NamedTuple):
    """An output token.  logprobs: where the request asks for them."""

    id: int
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class Accounting:
    """One object per request over all its legs and attempts; only the dispatcher writes it.

    cached_tokens is the first attempt's: recomputing after a failure is no cache hit.
    expert_counts: [MoE layer x expert], how often the last attempt's prompt chose each expert.
    degraded names what did not go the normal way, e.g. "local_prefill", "retried:decode".
    lossy names what made the answer another than the model's own, e.g. "weights=int8".
    """

    prompt_tokens: int
    cached_tokens: int = 0
    expert_counts: tuple[int, ...] = ()
    completion_tokens: int = 0
    moved_blocks: int = 0
    moved_bytes: int = 0
    mover: str = ""
    attempts: int = 0
    prefill_worker: WorkerId | None = None
    decode_worker: WorkerId | None = None
    finish: FinishReason | None = None
    degraded: list[str] = field(default_factory=list)
    lossy: list[str] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace)


class Generation(Protocol):
    """A running generation.  Iterate for batches of tokens; the end is exactly one of:
    StopAsyncIteration with `accounting.finish` set, or a TriremeError raised.
    `aclose` cancels it everywhere and is idempotent."""

    accounting: Accounting

    def __aiter__(self) -> AsyncIterator[tuple[Token, ...]]: ...
    async def __anext__(self) -> tuple[Token, ...]: ...
    async def aclose(self) -> None: ...


class Generator(Protocol):
    """What the HTTP edge needs of the dispatcher."""

    async def generate(self, request: Generate) -> Generation:
        """Admit the request.  Raises Overloaded (queue full) or Unavailable (no workers)
        at once; anything later comes out of the iteration."""
        ...
