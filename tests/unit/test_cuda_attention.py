"""The attention of GPUs gives what plain torch gives: FlexAttention itself, uncompiled, and
FlashInfer through a stand-in that takes what FlashInfer's documentation says it takes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from core.errors import ConfigError
from engine.cuda.flashinfer import FixedFlashInfer, FlashInferAttention, Kernels, page_tables
from engine.cuda.flex import (
    QUERY_BLOCK,
    FixedFlex,
    FlexAttention,
    Lane,
    block_mask,
    check,
    groups_of,
)
from engine.model.attention import Attention, StepContext, select
from engine.model.paged import PagedAttention
from tests.fakes import flashinfer
from tests.unit.cuda_help import (
    BLOCKS,
    DIM,
    HEADS,
    KV_HEADS,
    MIXED,
    SIZE,
    SPANS,
    Step,
    attend,
    expect,
    record,
)
from tests.unit.llama_help import config_of, twin

SCALE = 0.3
CONFIG = replace(config_of(twin()), heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, scale=SCALE)
WINDOWS = {"no_window": (0, 0), "windows": (7, 0), "wide_windows": (20, 33)}
STEPS = {"decodes": SPANS, "mixed": MIXED, "one_chunk": ((70, 20),), "one_decode": ((1, 31),)}
Make = Callable[[torch.Tensor, StepContext, tuple[int, ...]], Attention]


def by_flex(kv: torch.Tensor, context: StepContext, windows: tuple[int, ...]) -> Attention:
    groups = groups_of(context.spans, kv)
    return FlexAttention(kv, context, groups, windows, SCALE, attend)


def by_flashinfer(kv: torch.Tensor, context: StepContext, windows: tuple[int, ...]) -> Attention:
    return FlashInferAttention(kernels(), replace(CONFIG, windows=windows), kv, context)


def kernels() -> Kernels:
    return Kernels(flashinfer, torch.device("cpu"))


@pytest.mark.parametrize("make", [by_flex, by_flashinfer])
@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("shape", STEPS.values(), ids=STEPS)
def test_it_gives_what_plain_torch_gives(
    make: Make, windows: tuple[int, ...], shape: tuple[tuple[int, int], ...]
) -> None:
    step, reference = Step.of(shape), Step.of(shape)
    got = step.run(make(step.kv, step.context, windows))
    wanted = reference.run(PagedAttention(reference.kv, reference.context, windows, SCALE))
    expect(got, wanted)


def test_parts_of_a_step_may_take_turns() -> None:
    """As when prompts pass different layers: the plan of one is not used for the other."""
    step, reference = Step.of(MIXED), Step.of(MIXED)
    windows, shared = (0, 0), kernels()

    def turns(on: Step, make: Callable[[StepContext], Attention]) -> list[torch.Tensor]:
        parts = [select(on.context, chosen) for chosen in ((0, 1), (2, 3, 4, 5))]
        made = [(rows, make(context)) for rows, context in parts]
        return [
            attention(layer, on.query[rows], on.key[rows], on.value[rows])
            for layer in range(2)
            for rows, attention in made
        ]

    config = replace(CONFIG, windows=windows)
    got = turns(step, lambda at: FlashInferAttention(shared, config, step.kv, at))
    expect(got, turns(reference, lambda at: PagedAttention(reference.kv, at, windows, SCALE)))


def test_a_step_is_planned_once_per_window() -> None:
    step, shared = Step.of(SPANS, layers=6), kernels()
    config = replace(CONFIG, windows=(0, 7, 0, 7, 7, 0))
    step.run(FlashInferAttention(shared, config, step.kv, step.context))
    assert [shared.eager(True, window).wrapper.plans for window in (0, 7)] == [1, 1]


@pytest.mark.parametrize("kind", [FixedFlex, FixedFlashInfer])
@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_a_recording_finds_the_rows_of_the_step_at_hand(
    kind: type, windows: tuple[int, ...]
) -> None:
    """Recorded over one step's places, run over another's.

    The stand-in for FlashInfer computes on the host and cannot be recorded.
    """
    first, second, reference = (Step.of(SPANS, seed=s) for s in (1, 2, 2))
    cells = replace(first.context, spans=())
    if kind is FixedFlex:
        fixed = FixedFlex(first.kv, cells, 9, windows, SCALE, attend)
    else:
        config = replace(CONFIG, windows=windows)
        fixed = FixedFlashInfer(kernels(), config, first.kv, cells, 9)
    fixed.place(first.context.spans)

    def body() -> torch.Tensor:
        return torch.stack(first.run(fixed.attention())[:-1])

    replay = record(body) if kind is FixedFlex else body
    for mine, theirs in (
        (first.kv, second.kv),
        (first.query, second.query),
        (first.key, second.key),
        (first.value, second.value),
        (cells.block_ids, second.context.block_ids),
        (cells.offsets, second.context.offsets),
    ):
        mine.copy_(theirs)
    fixed.place(second.context.spans)
    got = [*replay(), first.kv]
    wanted = reference.run(PagedAttention(reference.kv, reference.context, windows, SCALE))
    expect(got, wanted)


@pytest.mark.parametrize("window", [0, 1, 16, 17, 40])
def test_flex_attention_reads_the_blocks_that_its_queries_see_and_no_others(window: int) -> None:
    """Uncompiled it reads the whole pool, and leaves the rest to the mask."""
    step = Step.of((*MIXED, (70, 33)))
    lane = Lane.of(step.kv)
    assert lane.stride % SIZE == 0
    singles = [span for span in step.context.spans if span.queries == 1]
    several = [[span] for span in step.context.spans if span.queries > 1]
    for spans, group in zip(
        [*several, singles], groups_of(step.context.spans, step.kv), strict=True
    ):
        mask = block_mask(group, window, lane)
        for i, span in enumerate(spans):
            for row, first in enumerate(range(span.start, span.end, QUERY_BLOCK)):
                last = min(first + QUERY_BLOCK, span.end) - 1
                lowest = max(0, first - window + 1) if window else 0
                seen = span.block_ids[lowest // SIZE : last // SIZE + 1]
                count = int(mask.kv_num_blocks[i, 0, row])
                listed = mask.kv_indices[i, 0, row, :count] * SIZE
                assert listed.tolist() == [block * lane.stride for block in seen]


def test_page_tables_are_those_of_the_documentation() -> None:
    """A page that is just full has page_size tokens, not none."""
    spans = Step.of(((1, 15), (1, 16), (33, 0))).context.spans
    indptr, indices, last_page_len = page_tables(spans, SIZE)
    assert indptr.tolist() == [0, 1, 3, 6]
    used = [span.block_ids[:pages] for span, pages in zip(spans, (1, 2, 3), strict=True)]
    assert indices.tolist() == [block for blocks in used for block in blocks]
    assert last_page_len.tolist() == [16, 1, 1]


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        ((BLOCKS, 1, 2, 1, 8, DIM), "kv.block_size"),
        ((BLOCKS, 1, 2, 1, 48, DIM), "kv.block_size"),
        ((1 << 17, 32, 2, 8, 16, 64), "kv.memory_mb"),
    ],
)
def test_a_pool_that_compiled_flex_attention_cannot_serve_is_refused(
    shape: tuple[int, ...], field: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check(torch.empty(shape, device="meta"))
    assert refused.value.field == field
    check(torch.empty(BLOCKS, 30, 2, 3, 16, 64, device="meta"))
