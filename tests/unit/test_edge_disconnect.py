"""Clients that leave, hosts that cancel, streams that are silent: raw ASGI, both modes."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from core.errors import TriremeError
from router.app import create_app
from router.request import Generate
from tests.unit.edge_kit import Step, completion, make_edge, say

PATH = "/v1/completions"
Message = dict[str, Any]


@dataclass
class Client:
    """The far end of one ASGI call: sends its body, leaves when told to."""

    body: bytes
    left: asyncio.Event = field(default_factory=asyncio.Event)
    sent: list[Message] = field(default_factory=list)
    got: asyncio.Event = field(default_factory=asyncio.Event)
    on_send: Callable[[Message], Awaitable[None]] | None = None

    async def receive(self) -> Message:
        if self.body:
            body, self.body = self.body, b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self.on_send:
            await self.on_send(message)
        self.sent.append(message)
        self.got.set()

    @property
    def data(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent)


def scope() -> Message:
    return {
        "type": "http",
        "method": "POST",
        "path": PATH,
        "raw_path": PATH.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [],
        "asgi": {"version": "3.0", "spec_version": "2.4"},
    }


def open_call(
    script: Callable[[Generate], Sequence[Step] | TriremeError], client: Client, **edge: Any
) -> tuple[Any, Any, "asyncio.Task[None]"]:
    context, generator = make_edge(script, **edge)
    call = create_app(context)(scope(), client.receive, client.send)
    return context, generator, asyncio.ensure_future(call)


def make_client(prompt: Any = "hi", **fields: Any) -> Client:
    return Client(json.dumps(completion(prompt, **fields)).encode())


async def until(condition: Callable[[], object]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("never came true")


def outcome(edge: Any, name: str, status: int) -> float | None:
    labels = {"route": PATH, "outcome": name, "status": str(status)}
    value: float | None = edge.metrics.registry.get_sample_value("trireme_requests_total", labels)
    return value


def waiting(request: Generate) -> list[Step]:
    return [(104,), asyncio.Event()]


@pytest.mark.parametrize("prompts", [["a"], ["a", "b", "c"]], ids=["one", "three"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_cancels_every_generation_once(
    stream: bool, prompts: list[str]
) -> None:
    async def test() -> None:
        client = make_client(prompts, stream=stream)
        edge, generator, call = open_call(waiting, client)
        await until(lambda: len(generator.started) == len(prompts))
        await until(lambda: all(len(g.steps) == 0 for g in generator.started))
        client.left.set()
        await asyncio.wait_for(call, 5)
        assert [g.closes for g in generator.started] == [1] * len(prompts)
        assert not any(m.get("more_body") is False for m in client.sent)
        assert outcome(edge, "cancelled", 499) == 1
        assert edge.metrics.in_flight._value.get() == 0

    asyncio.run(test())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_host_that_cancels_the_call_cancels_the_generation_once(stream: bool) -> None:
    async def test() -> None:
        edge, generator, call = open_call(waiting, make_client(stream=stream))
        await until(lambda: generator.started and not generator.started[0].steps)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert generator.started[0].closes == 1
        assert outcome(edge, "cancelled", 499) == 1

    asyncio.run(test())


def test_a_client_that_leaves_before_its_body_is_complete_starts_nothing() -> None:
    async def test() -> None:
        client = Client(b"")
        client.left.set()
        edge, generator, call = open_call(waiting, client)
        await asyncio.wait_for(call, 5)
        assert (client.sent, generator.started) == ([], [])
        assert outcome(edge, "cancelled", 499) == 1

    asyncio.run(test())


def test_a_body_that_never_comes_is_a_bad_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.wire.BODY_S", 0.02)

    async def test() -> None:
        client = Client(b"")
        _, _, call = open_call(waiting, client)
        await asyncio.wait_for(call, 5)
        assert client.sent[0]["status"] == 400
        assert b"did not arrive" in client.data

    asyncio.run(test())


@pytest.mark.parametrize("failure", [OSError("gone"), None], ids=["broken", "stalled"])
def test_a_client_that_takes_nothing_counts_as_gone(
    failure: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.wire.SEND_S", 0.02)

    async def refuse(message: Message) -> None:
        if failure:
            raise failure
        await asyncio.Event().wait()

    async def test() -> None:
        client = make_client(stream=True)
        client.on_send = refuse
        edge, generator, call = open_call(waiting, client)
        await asyncio.wait_for(call, 5)
        assert generator.started[0].closes == 1
        assert outcome(edge, "cancelled", 499) == 1

    asyncio.run(test())


def test_a_client_that_leaves_with_text_still_on_its_way_leaves_nothing_running() -> None:
    async def block(message: Message) -> None:
        await asyncio.Event().wait()

    async def test() -> None:
        client = make_client(stream=True)
        client.on_send = block
        steps: list[Step] = [(104,), (105,), asyncio.Event()]
        _, generator, call = open_call(lambda request: steps, client)
        await until(lambda: generator.started and len(generator.started[0].steps) == 1)
        await asyncio.sleep(0.01)
        client.left.set()
        await asyncio.wait_for(call, 5)
        assert generator.started[0].closes == 1

    asyncio.run(test())


def test_the_generation_is_closed_before_the_end_of_the_stream_goes_out() -> None:
    async def test() -> None:
        client = make_client(stream=True)
        edge, generator, call = open_call(lambda request: say("x"), client)

        async def check(message: Message) -> None:
            if b'finish_reason":"stop' in message.get("body", b""):
                assert generator.started[0].closes == 1

        client.on_send = check
        await asyncio.wait_for(call, 5)
        assert client.data.endswith(b"data: [DONE]\n\n")
        assert outcome(edge, "finished", 200) == 1

    asyncio.run(test())


def test_a_disconnect_reported_right_after_the_last_byte_is_no_cancellation() -> None:
    """Servers report one as soon as the response is complete."""

    async def test() -> None:
        client = make_client(stream=True)

        async def leave(message: Message) -> None:
            if message.get("more_body") is False:
                client.left.set()
                await asyncio.sleep(0.01)

        client.on_send = leave
        edge, _, call = open_call(lambda request: say("x"), client)
        await asyncio.wait_for(call, 5)
        assert outcome(edge, "finished", 200) == 1

    asyncio.run(test())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_only_streams_are_kept_alive_while_nothing_comes(stream: bool) -> None:
    async def test() -> None:
        first = asyncio.Event()
        client = make_client(stream=stream)
        _, _, call = open_call(lambda request: [first, *say("x")], client, keep_alive_s=0.01)
        if stream:
            await until(lambda: client.data.count(b": keep-alive\n\n") >= 2)
        else:
            await asyncio.sleep(0.05)
            assert not client.sent
        first.set()
        await asyncio.wait_for(call, 5)
        assert b'"text":"x"' in client.data
        assert (b"keep-alive" in client.data) is stream

    asyncio.run(test())


def test_text_goes_out_as_soon_as_it_is_certain() -> None:
    async def test() -> None:
        more = asyncio.Event()
        client = make_client(stream=True, stop="cd")
        _, _, call = open_call(lambda request: [tuple(b"abc"), more, *say("x")], client)
        await until(lambda: b'"text":"ab"' in client.data)
        assert (
            b"c"
            not in json.dumps(
                [json.loads(e[6:])["choices"][0]["text"] for e in client.data.split(b"\n\n")[:-1]]
            ).encode()
        )
        more.set()
        await asyncio.wait_for(call, 5)
        assert b'"text":"cx"' in client.data

    asyncio.run(test())
