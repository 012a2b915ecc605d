"""One `trireme serve` on Ray with the real model, used as people use it, and harmed."""

import asyncio
import json
import os
import random
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.rig.cluster import leftovers
from tests.rig.processes import alive, listeners, until
from tests.rig.serving import START_S, STOP_S, Serving, free_port, run

NAME = "e2e"
MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "Name three seas. Answer in one line. 🚣‍♀️ 漕ぐ"}]
STREAMS = 16


@dataclass
class Served:
    process: Serving
    folder: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0)

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/status", timeout=30) as answer:
            return json.load(answer)

    def worker(self, name: str) -> dict[str, Any] | None:
        found = [w for w in self.status()["workers"] if w["worker_id"] == name]
        return found[0] if found else None

    def idle(self) -> bool:
        """Every worker is connected and holds nothing."""
        workers = self.status()["workers"]
        return len(workers) == 2 and all(
            w["connected"] and w["report"] and not leftovers(w["report"]) for w in workers
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, port = tmp_path_factory.mktemp("served"), free_port()
    flags = ("--name", NAME, "--port", str(port), "--kv.memory_mb", "256")
    with Serving(folder, *flags) as process:
        until(lambda: process.says("Ctrl-C stops it"), START_S)
        yield Served(process, folder, port)


def test_it_says_what_it_does_and_stays_on_loopback(served: Served) -> None:
    said = served.process.output.read_text()
    for step in ("model", "ray", "supervisor", "prefill-0", "decode-0", "serve", "first token"):
        assert any(line.startswith(step) for line in said.splitlines()), step
    assert f"curl {served.url}/v1/chat/completions" in said
    addresses = listeners(served.process.look() | {served.process.process.pid})
    assert ("127.0.0.1", served.port) in addresses
    assert {address for address, _ in addresses} <= {"127.0.0.1", "::1"}


def test_an_answer_to_a_schema_is_json_of_that_schema(served: Served) -> None:
    properties = {
        "name": {"type": "string", "maxLength": 40},
        "salty": {"type": "boolean"},
        "depth_m": {"type": "integer", "minimum": 0, "maximum": 12000},
    }
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    form = {"type": "json_schema", "json_schema": {"name": "sea", "schema": schema}}
    asked: list[Any] = [{"role": "user", "content": "Describe the Baltic Sea as JSON."}]
    with served.client() as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=asked, max_tokens=200, temperature=0, response_format=form
        )
    assert answer.choices[0].finish_reason == "stop"
    sea = json.loads(answer.choices[0].message.content or "")
    kinds = {name: type(value) for name, value in sea.items()}
    assert kinds == {"name": str, "salty": bool, "depth_m": int}
    assert 0 <= sea["depth_m"] <= 12000


def test_names_and_ports_in_use_are_refused_by_name(served: Served) -> None:
    code, said = run(served.folder, "serve", "--name", NAME, "--port", str(free_port()))
    assert (code, f"'{NAME}' is running" in said) == (2, True), said
    code, said = run(served.folder, "serve", "--name", "other", "--port", str(served.port))
    assert (code, f"cannot listen on 127.0.0.1:{served.port}" in said) == (2, True), said


def test_the_official_client_streams_what_it_gets_whole(served: Served) -> None:
    client = served.client()
    ask = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**ask)
    pieces = list(
        client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].delta.content or "" for c in pieces if c.choices)
    assert text == whole.choices[0].message.content != ""
    ends = [c.choices[0].finish_reason for c in pieces if c.choices if c.choices[0].finish_reason]
    assert ends == [whole.choices[0].finish_reason]
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    repeat = pieces[-1].usage.prompt_tokens_details.cached_tokens
    assert repeat == (whole.usage.prompt_tokens - 1) // 16 * 16
    assert client.models.list().data[0].id == MODEL


def test_a_stop_string_cuts_both_modes_at_the_same_place(served: Served) -> None:
    client = served.client()
    ask = {"model": MODEL, "prompt": "1, 2, 3, 4,", "temperature": 0, "max_tokens": 30,
           "stop": [" 8"]}  # fmt: skip
    whole = client.completions.create(**ask).choices[0]
    streamed = "".join(c.choices[0].text for c in client.completions.create(**ask, stream=True))
    assert (whole.text, whole.finish_reason) == (" 5, 6, 7,", "stop")
    assert streamed == whole.text


def test_errors_are_what_the_client_expects(served: Served) -> None:
    client = served.client()
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[100] * 9000)
    assert "9000" in long.value.message
    assert long.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
def test_a_client_that_leaves_is_noticed_on_the_workers(served: Served, stream: bool) -> None:
    before = cancelled(served)

    async def leave() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="unused", max_retries=0, timeout=2.0
        ) as client:
            answer = client.completions.create(
                model=MODEL, prompt="Once upon a time", max_tokens=2000, stream=stream,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            if stream:
                async for _ in await answer:
                    return
            with pytest.raises(openai.APITimeoutError):
                await answer

    asyncio.run(leave())
    until(served.idle, 20.0)
    assert cancelled(served) > before


def test_200_clients_that_leave_at_random_moments_leave_nothing(served: Served) -> None:
    """Half of them stream; they leave before, during and after prefill, transfer and attach."""
    source = random.Random(23)

    async def leave(client: openai.AsyncOpenAI, turn: asyncio.Semaphore, index: int) -> None:
        async with turn:
            with suppress(TimeoutError):
                async with asyncio.timeout(source.uniform(0.0, 1.2) ** 2):
                    answer = await client.completions.create(
                        model=MODEL, prompt=[1000 + index] * source.choice((5, 60, 200)),
                        max_tokens=300, stream=bool(index % 2), extra_body={"ignore_eos": True},
                    )  # fmt: skip
                    async for _ in answer:
                        pass

    async def all_leave() -> None:
        turn = asyncio.Semaphore(20)
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="unused", max_retries=0, timeout=60.0
        ) as client:
            await asyncio.gather(*(leave(client, turn, i) for i in range(200)))

    asyncio.run(all_leave())
    until(served.idle, 30.0)
    router = served.status()["router"]
    assert not router["live"]
    assert not any(router["in_flight_tokens"].values())
    assert router["counters"]["requests"]["cancelled"] > 100


def test_sigkill_of_decode_in_16_streams_changes_no_text_and_a_new_epoch_serves(
    served: Served,
) -> None:
    calm = asyncio.run(texts(served, harm=None))
    victim = served.worker("decode-0")
    pid = pid_of(served, "decode-0")
    assert asyncio.run(texts(served, harm=pid)) == calm
    until(lambda: (w := served.worker("decode-0")) and w["epoch"] > victim["epoch"], 60.0)
    until(served.idle, 60.0)


def test_serving_goes_on_without_the_supervisor(served: Served) -> None:
    (pid,) = [
        p for p in served.process.look() if alive(p) and title(p).startswith("ray::Supervisor")
    ]
    os.kill(pid, signal.SIGKILL)
    answer = served.client().completions.create(
        model=MODEL, prompt="The supervisor is away,", max_tokens=3, temperature=0
    )
    assert answer.usage.completion_tokens == 3


def test_the_doctor_finds_all_well_also_after_a_death(served: Served) -> None:
    code, said = run(served.folder, "doctor", "--name", NAME)
    assert (code, said.endswith("all well")) == (0, True), said
    assert "prefill-0 → decode-0" in said


def test_status_tells_and_down_leaves_nothing(served: Served) -> None:
    code, said = run(served.folder, "status", "--name", NAME)
    assert code == 0
    assert "prefill-0" in said
    assert "decode-0" in said
    pids = served.process.look()
    endless, short = stream(served, 4000), stream(served, 20)
    next(endless), next(short)
    assert run(served.folder, "down", "--name", NAME) == (0, f"{NAME} is down")
    assert [c.choices[0].finish_reason for c in short][-1] == "length"
    with pytest.raises(openai.APIError, match="shutting down"):
        list(endless)
    assert served.process.process.wait(STOP_S) == 0
    until(lambda: not any(alive(pid) for pid in pids), STOP_S)
    assert served.process.output.read_text().rstrip().endswith("stopped")
    assert run(served.folder, "down", "--name", NAME)[0] != 0


def stream(served: Served, max_tokens: int) -> Iterator[Any]:
    return iter(
        served.client().completions.create(
            model=MODEL, prompt="For ever and", max_tokens=max_tokens, stream=True, temperature=0,
            extra_body={"ignore_eos": True},
        )
    )  # fmt: skip


async def texts(served: Served, harm: int | None) -> list[str]:
    """16 streams; the process `harm` is killed once half of them have some text."""
    begun: set[int] = set()
    struck = False

    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="unused", max_retries=0, timeout=120.0
    ) as client:

        async def one(index: int) -> str:
            nonlocal struck
            answer = await client.completions.create(
                model=MODEL, prompt=f"Story number {index}: the sea", max_tokens=24, stream=True,
                temperature=0, extra_body={"ignore_eos": True},
            )  # fmt: skip
            text = ""
            async for chunk in answer:
                text += chunk.choices[0].text
                begun.add(index)
                if harm is not None and not struck and len(begun) > STREAMS // 2:
                    struck = True
                    os.kill(harm, signal.SIGKILL)
            return text

        return await asyncio.gather(*map(one, range(STREAMS)))


def cancelled(served: Served) -> int:
    counters = [c for w in served.status()["workers"] for c in w["report"]["counters"]]
    return sum(c["value"] for c in counters if c["name"] == "cancelled")


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()


def pid_of(served: Served, name: str) -> int:
    """From what `serve` printed when it was ready."""
    lines = served.process.output.read_text().splitlines()
    (line,) = [x for x in lines if x.startswith(name) and "pid" in x]
    return int(line.rpartition("pid ")[2])
