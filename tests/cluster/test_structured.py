"""Structured output from real processes: handed over, over HTTP, refused, and after a death."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn

from core.sampling import Grammar, GrammarKind, Sampling
from core.spec import ClusterSpec, from_mapping
from engine.model.refs import resolve
from engine.text.load import load_tokenizer
from router.app import create_app
from tests.rig.cluster import Cluster, Router
from tests.rig.processes import alive, children, until
from tests.rig.spelling import give_tokenizer
from tests.rig.tiny import tiny_model
from tests.unit.edge_kit import MODEL, make_edge
from tests.unit.grammar_help import GRAMMARS, OBJECT, TOKENS, regex, text_of
from tests.unit.test_grammar_engine import check

PATIENT = {"call_s": 10.0, "prefill_s": 90.0, "transfer_s": 10.0, "token_s": 90.0, "lease_s": 10.0}
"""The first grammar has each worker start its compiler, which takes seconds."""
PROMPT = tuple(range(60, 100))
SERVER_S = 10.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return give_tokenizer(tiny_model(tmp_path_factory.mktemp("spelled")), TOKENS)


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Cluster]:
    raw = {
        "model": {"ref": str(folder), "dtype": "float32"},
        "pools": [{"role": "prefill"}, {"role": "decode"}],
        "kv": {"blocks": 256},
        "timeouts": PATIENT,
    }
    made = Cluster(from_mapping(ClusterSpec, raw))
    yield made
    made.stop()


@asynccontextmanager
async def served(cluster: Cluster, folder: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    """The HTTP edge before the cluster, on a real socket."""
    async with Router(cluster) as router:
        edge, _ = make_edge(
            generator=router.dispatcher,
            tokenizer=load_tokenizer(resolve(str(folder))),
            max_model_len=lambda: 1000,
        )
        config = uvicorn.Config(create_app(edge), host="127.0.0.1", port=0, log_level="warning")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        async with asyncio.timeout(SERVER_S):
            while not server.started:
                await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client
        server.should_exit = True
        await asyncio.wait_for(serving, SERVER_S)


def ruled(grammar: Grammar, **changes: Any) -> Sampling:
    return Sampling(**{"temperature": 1.0, "max_tokens": 500, "grammar": grammar} | changes)


def failed(cluster: Cluster) -> int:
    """Attempts that ended for their grammar, on all workers."""
    counters = [c for w in cluster.workers.values() for c in w.report()["counters"]]
    return sum(c["value"] for c in counters if c["name"] == "grammars_failed")


def ask(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "say something, please"}]
    return {"model": MODEL, "messages": messages, "seed": 7, "max_tokens": 400, **fields}


def test_handed_over_every_output_matches_its_grammar(cluster: Cluster) -> None:
    async def run() -> None:
        async with Router(cluster) as router:
            jobs = [(kind, seed) for kind in GRAMMARS for seed in range(3)]
            outs = await asyncio.gather(
                *(router.tokens(PROMPT, ruled(GRAMMARS[kind], seed=seed)) for kind, seed in jobs)
            )
        for (kind, _), (tokens, accounting) in zip(jobs, outs, strict=True):
            check(kind, text_of(tokens))
            assert (accounting.prefill_worker, accounting.decode_worker) == (
                "prefill-0",
                "decode-0",
            )
            assert accounting.attempts == 1

    asyncio.run(run())
    cluster.settle()


def test_the_openai_client_gets_what_it_asked_for(cluster: Cluster, folder: Path) -> None:
    schema = {"name": "person", "schema": json.loads(OBJECT), "strict": True}
    form = {"type": "json_schema", "json_schema": schema}

    async def run() -> None:
        async with served(cluster, folder) as client:
            create = client.chat.completions.create
            whole = await create(**ask(response_format=form, n=2))
            for choice in whole.choices:
                assert choice.finish_reason == "stop"
                check(GrammarKind.JSON_SCHEMA, choice.message.content or "")
            stream = await create(**ask(response_format=form, stream=True))
            parts = [c.choices[0].delta.content or "" async for c in stream]
            assert "".join(parts) == whole.choices[0].message.content
            pattern = {"type": "regex", "regex": "(yes|no)!"}
            answer = await client.completions.create(
                model=MODEL, prompt="well?", extra_body={"response_format": pattern}
            )
            assert answer.choices[0].text in ("yes!", "no!")

    asyncio.run(run())
    cluster.settle()


def test_a_bad_grammar_is_the_clients_fault_and_tried_once(cluster: Cluster, folder: Path) -> None:
    before = failed(cluster)
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}

    async def run() -> None:
        async with served(cluster, folder) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**ask(response_format=bad))
            assert caught.value.param == "response_format"
            assert 'Unsupported type "nope"' in caught.value.message
            good = await client.chat.completions.create(
                **ask(response_format={"type": "regex", "regex": "ok"})
            )
            assert good.choices[0].message.content == "ok"

    asyncio.run(run())
    assert failed(cluster) == before + 1
    cluster.settle()


def test_when_the_decode_worker_dies_the_output_goes_on_and_matches(cluster: Cluster) -> None:
    victim = cluster.workers["decode-0"]
    pattern = "([a-z]{3}-){120}end"

    async def run() -> None:
        async with Router(cluster) as router:
            await router.tokens(PROMPT, ruled(regex("warm")))
            generation = await router.dispatcher.generate(
                router.request(PROMPT, ruled(regex(pattern)))
            )
            tokens: list[int] = []
            async for batch in generation:
                tokens += (token.id for token in batch)
                if len(tokens) > 20 and victim.alive:
                    victim.kill()
        assert re.fullmatch(pattern, text_of(tokens))
        assert generation.accounting.attempts > 1

    helpers = children(victim.process.pid)
    assert helpers
    asyncio.run(run())
    assert until(lambda: not any(map(alive, helpers)), SERVER_S)
