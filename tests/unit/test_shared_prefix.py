"""Shared prefixes: who is grouped, and that nobody's attention changes by it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.ids import BlockId
from engine.model.attention import Span, StepContext, select
from engine.model.paged import PagedAttention
from engine.model.prefix_groups import PrefixGroup, prefix_groups
from engine.model.shared_prefix import WORTH_TOKENS, SharedPrefixAttention, share_prefixes
from tests.unit.expert_help import moe_decoder

SIZE, DIM = 4, 8
CONFIG = replace(moe_decoder(moe=None).config, heads=6, kv_heads=2, head_dim=DIM)

Table = tuple[BlockId, ...]


def table(text: str) -> Table:
    return tuple(BlockId(ord(c)) for c in text)


def groups(*texts: str, worth: int = 1) -> list[tuple[tuple[int, ...], str]]:
    found = prefix_groups([table(t) for t in texts], worth)
    return [(g.members, "".join(map(chr, g.prefix))) for g in found]


# ------------------------------------------------------------------------------------------ groups


def test_sequences_that_begin_alike_are_a_group() -> None:
    assert groups("abcx", "zz", "abcy", "abc") == [((0, 2, 3), "abc")]


def test_the_level_of_sharing_that_saves_most_is_chosen() -> None:
    assert groups("aaax", "aaay", "aaaz", "aaaw") == [((0, 1, 2, 3), "aaa")]
    assert groups("abbbbx", "abbbby", "accccx", "accccy") == [((0, 1), "abbbb"), ((2, 3), "acccc")]


def test_nobody_is_grouped_with_himself_or_for_too_little() -> None:
    assert groups("abc") == groups("abc", "bcd") == groups("", "") == []
    assert groups("abx", "aby", worth=2) == [((0, 1), "ab")]
    assert groups("abx", "aby", worth=3) == []


TABLES = st.lists(st.text("ab", max_size=6).map(table), max_size=6)


@given(tables=TABLES, worth=st.integers(1, 5))
def test_groups_are_apart_share_what_they_say_and_save_no_less_than_any_one_group(
    tables: list[Table], worth: int
) -> None:
    found = prefix_groups(tables, worth)
    members = [m for g in found for m in g.members]
    assert len(set(members)) == len(members)
    assert all(tables[m][: len(g.prefix)] == g.prefix for g in found for m in g.members)
    assert all(g.saved >= worth for g in found)
    prefixes = {t[:n] for t in tables for n in range(1, len(t) + 1)}
    savings = [len(p) * (sum(t[: len(p)] == p for t in tables) - 1) for p in prefixes]
    alone = max((saved for saved in savings if saved >= worth), default=0)
    assert sum(g.saved for g in found) >= alone


# --------------------------------------------------------------------------------------- attention


class Step:
    """Decodes that share prefixes, and a chunk of a prompt, over a pool full of NaN where nothing
    was written."""

    def __init__(self, prefixes: list[int], tails: list[tuple[int, int]], dtype: torch.dtype):
        """prefixes: lengths in blocks; tails: (which prefix, own tokens) of each sequence."""
        self.fresh = iter(range(1000))
        shared = [self.take(n) for n in prefixes]
        spans = [Span(0, 3, 5, self.take(2))]
        for which, own in tails:
            start = len(shared[which]) * SIZE + own
            own_blocks = self.take(-(-(own + 1) // SIZE))
            spans.append(Span(len(spans) + 2, 1, start, (*shared[which], *own_blocks)))
        cells = [(s, p) for s in spans for p in range(s.start, s.end)]
        self.context = StepContext(
            tuple(spans),
            torch.tensor([s.block_ids[p // SIZE] for s, p in cells]),
            torch.tensor([p % SIZE for _, p in cells]),
        )
        self.generator = torch.Generator().manual_seed(len(cells))
        shape = (max(b for s in spans for b in s.block_ids) + 1, 3, 2, 2, SIZE, DIM)
        self.kv = self.random(*shape).to(dtype)
        for span in spans:
            for p in range(span.start, len(span.block_ids) * SIZE):
                self.kv[span.block_ids[p // SIZE], :, :, :, p % SIZE] = float("nan")

    def take(self, count: int) -> Table:
        return tuple(BlockId(next(self.fresh)) for _ in range(count))

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def inputs(self, dtype: torch.dtype) -> list[torch.Tensor]:
        rows = self.context.spans[-1].end_row
        return [self.random(rows, heads, DIM).to(dtype) for heads in (6, 2, 2)]


@settings(max_examples=40, deadline=None)
@given(
    prefixes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    tails=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30)), min_size=1, max_size=7),
    windows=st.sampled_from([(0, 0, 0), (0, 7, 0)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_sharing_changes_nothing_for_anybody(
    prefixes: list[int],
    tails: list[tuple[int, int]],
    windows: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    tails = [(which % len(prefixes), own) for which, own in tails]
    config = replace(CONFIG, windows=windows)
    plain, shared = (Step(prefixes, tails, dtype) for _ in range(2))
    tables = [s.block_ids[: s.start // SIZE] for s in shared.context.spans[1:]]
    found = [
        PrefixGroup(tuple(m + 1 for m in group.members), group.prefix)
        for group in prefix_groups(tables)
    ]
    expected = PagedAttention(plain.kv, plain.context, windows, config.scale)
    attention = SharedPrefixAttention(shared.kv, shared.context, config, found)
    for layer in range(3):
        inputs = plain.inputs(dtype)
        close = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
        torch.testing.assert_close(attention(layer, *inputs), expected(layer, *inputs), **close)
        assert torch.equal(shared.kv.nan_to_num(7), plain.kv.nan_to_num(7))


def test_a_prefix_longer_than_one_piece_is_merged_from_pieces() -> None:
    step = Step([520], [(0, 1), (0, 9)], torch.float32)
    group = PrefixGroup((1, 2), step.context.spans[1].block_ids[:520])
    inputs = step.inputs(torch.float32)
    plain = PagedAttention(step.kv, step.context, CONFIG.windows, CONFIG.scale)
    expected = plain(0, *inputs)
    got = SharedPrefixAttention(step.kv, step.context, CONFIG, [group])(0, *inputs)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("enough", [True, False], ids=["enough", "too_little"])
def test_only_what_is_worth_it_is_shared(enough: bool) -> None:
    blocks = WORTH_TOKENS // SIZE // 8 - (not enough)
    step = Step([blocks], [(0, 1)] * 9, torch.float32)
    attention = share_prefixes(step.kv, step.context, CONFIG)
    assert isinstance(attention, SharedPrefixAttention if enough else PagedAttention)


def test_a_model_of_windows_only_shares_nothing() -> None:
    step = Step([WORTH_TOKENS // SIZE], [(0, 1)] * 2, torch.float32)
    config = replace(CONFIG, windows=(5, 5, 5))
    assert isinstance(share_prefixes(step.kv, step.context, config), PagedAttention)


def test_selected_spans_keep_their_cells_and_get_rows_of_their_own() -> None:
    context = Step([1], [(0, 2), (0, 3), (0, 9)], torch.float32).context
    rows, chosen = select(context, [3, 0, 1])
    assert rows.tolist() == [5, 0, 1, 2, 3]
    assert [(s.first_row, s.queries) for s in chosen.spans] == [(0, 1), (1, 3), (4, 1)]
    assert chosen.block_ids.tolist() == context.block_ids[rows].tolist()
    assert chosen.offsets.tolist() == context.offsets[rows].tolist()
