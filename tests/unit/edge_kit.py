"""What the edge's tests stand on: a byte tokenizer, a scripted generator, an edge around them."""

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from core.clock import ManualClock
from core.errors import Stage, TriremeError, WorkerLost
from core.messages import FinishReason
from core.spec import HttpSpec
from core.trace import TraceEvent
from router.app import EdgeContext, ReadyState, create_app
from router.metrics import EdgeMetrics
from router.request import Accounting, Generate, Token
from tests.fakes.model import told

EOS = 256
MODEL = "org/bytes"


class ByteTokenizer:
    """Token = byte; 256 is the end token, which has no text."""

    eos_ids = frozenset((EOS,))
    vocab_size = 257
    longest_token = 4

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,)) if token_id < EOS else b""

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant:"


Step = tuple[int, ...] | TriremeError | Exception | asyncio.Event | FinishReason
"""Tokens; an error to raise; an event to wait for; the end."""


@dataclass
class Scripted:
    """A Generation that plays its steps."""

    request: Generate
    steps: list[Step]
    accounting: Accounting
    clock: ManualClock
    closes: int = 0

    def __aiter__(self) -> "Scripted":
        return self

    async def __anext__(self) -> tuple[Token, ...]:
        while self.steps and not self.closes:
            step = self.steps.pop(0)
            await asyncio.sleep(0)
            if isinstance(step, asyncio.Event):
                await asyncio.wait_for(step.wait(), 10)
            elif isinstance(step, Exception):
                raise step
            elif isinstance(step, FinishReason):
                self.accounting.finish = step
            else:
                self.clock.advance(0.5)
                if not self.accounting.trace.first(TraceEvent.FIRST_TOKEN):
                    self.accounting.trace.mark(TraceEvent.FIRST_TOKEN, self.clock())
                return tuple(Token(t, told(self.request.sampling, t)) for t in step)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closes += 1
        await asyncio.sleep(0)


@dataclass
class ScriptedGenerator:
    """Plays `script(request)`; a script that is an error is raised at admission."""

    clock: ManualClock
    script: Callable[[Generate], Sequence[Step] | TriremeError]
    started: list[Scripted] = field(default_factory=list)

    async def generate(self, request: Generate) -> Scripted:
        steps = self.script(request)
        if isinstance(steps, TriremeError):
            raise steps
        accounting = Accounting(len(request.tokens), cached_tokens=min(2, len(request.tokens)))
        accounting.mover, accounting.moved_bytes, accounting.attempts = "shm", 64, 1
        self.clock.advance(0.25)
        accounting.trace.mark(TraceEvent.RECEIVED, self.clock())
        self.started.append(Scripted(request, list(steps), accounting, self.clock))
        return self.started[-1]


def say(text: str | bytes, size: int = 1, finish: FinishReason = FinishReason.STOP) -> list[Step]:
    """Steps that generate `text`, `size` tokens a step, and end."""
    raw = text if isinstance(text, bytes) else text.encode()
    return [tuple(raw[i : i + size]) for i in range(0, len(raw), size)] + [finish]


def make_edge(
    script: Callable[[Generate], Sequence[Step] | TriremeError] = lambda request: say("hello"),
    **changes: Any,
) -> tuple[EdgeContext, ScriptedGenerator]:
    clock = ManualClock(100.0)
    generator = ScriptedGenerator(clock, script)
    ids, seeds = itertools.count(), itertools.count(1000)

    async def ready() -> ReadyState:
        return ReadyState(True)

    values: dict[str, Any] = {
        "generator": generator,
        "tokenizer": ByteTokenizer(),
        "model_name": MODEL,
        "max_model_len": lambda: 200,
        "http": HttpSpec(max_body_bytes=100_000),
        "ready": ready,
        "status": lambda: {"workers": 2},
        "metrics": EdgeMetrics(),
        "clock": clock,
        "new_id": lambda: f"id{next(ids)}",
        "new_seed": lambda: next(seeds),
        "unix_time": lambda: 1_700_000_000.0,
        "keep_alive_s": 5.0,
    }
    return EdgeContext(**values | changes), generator


def client_of(edge: EdgeContext) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(edge))
    return httpx.AsyncClient(transport=transport, base_url="http://edge")


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def completion(prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **fields}


async def post(edge: EdgeContext, path: str, body: Any) -> httpx.Response:
    async with client_of(edge) as client:
        if isinstance(body, bytes):
            return await client.post(path, content=body)
        return await client.post(path, json=body)


def events(response: httpx.Response) -> list[Any]:
    """The data of all server-sent events, JSON decoded; "[DONE]" as it is."""
    found = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    return [data if data == "[DONE]" else json.loads(data) for data in found]


def streamed_text(chunks: list[Any], index: int = 0) -> str:
    """All deltas of one choice, of either endpoint."""
    choices = [c for e in chunks if e != "[DONE]" for c in e["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def run(test: Any) -> Any:
    return asyncio.run(asyncio.wait_for(test, 30))


def get(edge: Any, path: str, method: str = "GET") -> Any:
    async def ask() -> Any:
        async with client_of(edge) as client:
            return await client.request(method, path)

    return run(ask())


def lost() -> WorkerLost:
    return WorkerLost("the link ended; try again", stage=Stage.DECODE, worker="d-1")
