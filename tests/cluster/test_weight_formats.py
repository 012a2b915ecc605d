"""Pools that store weights differently: whose KV may be mixed, and what the answer says of it."""

import asyncio
import random
from functools import partial
from pathlib import Path

import gguf
import pytest
import torch

from core.errors import Incompatible
from core.messages import WIRE_VERSION, Hello
from core.sampling import Sampling
from engine.model.decoder import Decoder
from engine.reference import DenseAttention
from router.request import Accounting
from tests.cluster.conftest import Start
from tests.models import twin
from tests.models.gguf_files import write_gguf
from tests.rig.cluster import Cluster, Router
from tests.rig.tiny import VOCAB, decoder
from transport.session_client import ClientSession

OUTPUT = 8


def prompt(seed: int) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(VOCAB) for _ in range(70))


def pools(prefill: str, decode: str) -> list[dict[str, str]]:
    return [{"role": "prefill", "weights": prefill}, {"role": "decode", "weights": decode}]


def generate(cluster: Cluster, tokens: tuple[int, ...]) -> tuple[list[int], Accounting]:
    async def run() -> tuple[list[int], Accounting]:
        async with Router(cluster) as router:
            return await router.tokens(tokens, Sampling(max_tokens=OUTPUT, ignore_eos=True))

    return asyncio.run(run())


def plain_loop(prefill: Decoder, decode: Decoder, tokens: tuple[int, ...]) -> list[int]:
    """Greedy output of one model over the KV that another computed for the prompt."""
    attention = DenseAttention(prefill.config, len(tokens) + OUTPUT, torch.float32)
    out: list[int] = []
    inputs = list(tokens)
    with torch.inference_mode():
        for model in (prefill, *[decode] * (OUTPUT - 1)):
            at = torch.arange(attention.length, attention.length + len(inputs))
            hidden = model.hidden(torch.tensor(inputs), at, attention)
            attention.length += len(inputs)
            out.append(int(model.logits(hidden[-1:]).argmax()))
            inputs = out[-1:]
    return out


def test_kv_of_other_values_is_refused_by_name_and_the_router_goes_round_it(
    start: Start, tiny_folder: Path
) -> None:
    cluster = start(pools=pools("float32", "int8"))
    exact, int8 = decoder(tiny_folder), decoder(tiny_folder, "int8")
    tokens, accounting = generate(cluster, prompt(11))
    assert tokens == plain_loop(int8, int8, prompt(11))
    assert tokens != plain_loop(exact, exact, prompt(11)), "else nothing was tested"
    assert (accounting.attempts, accounting.moved_blocks) == (1, 0)
    assert accounting.degraded == ["incompatible_kv"]
    assert accounting.lossy == ["weights=int8"]
    cluster.settle()


def test_a_sender_of_other_values_is_turned_away_at_the_door(start: Start) -> None:
    """Whatever routers believe."""
    cluster = start(pools=pools("float32", "int8"))

    async def run() -> str:
        prefill, decode = (cluster.workers[name].info for name in ("prefill-0", "decode-0"))
        connect = partial(ClientSession.connect, on_event=print, on_lost=print, connect_s=5.0)
        known = await connect(prefill.address, Hello(WIRE_VERSION, "router", prefill.epoch))
        hello = Hello(
            WIRE_VERSION, "prefill-0", decode.epoch, known.welcome.compat, known.welcome.host
        )
        with pytest.raises(Incompatible) as caught:
            await connect(decode.address, hello)
        await known.close()
        assert "weights=exact" in caught.value.message
        assert "weights=int8" in caught.value.message
        return caught.value.field

    assert asyncio.run(run()) == "kv_variant"


def test_declared_to_share_the_pools_exchange_kv_and_say_that_it_is_lossy(
    start: Start, tiny_folder: Path
) -> None:
    cluster = start(pools=pools("float32", "int8"), weights={"share_kv": True})
    exact, int8 = decoder(tiny_folder), decoder(tiny_folder, "int8")
    for other, seed in ((int8, 6), (exact, 10)):
        tokens, accounting = generate(cluster, prompt(seed))
        assert tokens == plain_loop(exact, int8, prompt(seed))
        assert tokens != plain_loop(other, other, prompt(seed)), "else nothing was tested"
        assert accounting.moved_blocks > 0
        assert accounting.degraded == []
        assert accounting.lossy == ["weights=shared(exact+int8)"]
    infos = [w.info for w in cluster.workers.values()]
    assert [i.weights for i in infos] == ["float32", "int8"]
    assert {i.kv_variant for i in infos} == {"kv=float32/weights=shared(exact+int8)"}
    cluster.settle()


def test_codes_and_values_of_one_gguf_file_exchange_kv_and_are_exact(
    start: Start, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, twin("llama", hidden_size=64, intermediate_size=96, vocab_size=VOCAB),
               gguf.GGMLQuantizationType.Q4_1)  # fmt: skip
    model = {"ref": str(path), "dtype": "float32"}
    cluster = start(pools=pools("float32", "gguf"), model=model)
    tokens, accounting = generate(cluster, prompt(3))
    exact = decoder(path)
    assert tokens == plain_loop(exact, exact, prompt(3))
    assert accounting.moved_blocks > 0
    assert (accounting.degraded, accounting.lossy) == ([], [])
    cluster.settle()
