"""Attention over the paged KV pool by FlexAttention (Dong et al., arXiv:2412.05496).

A layer's keys are seen as one long row of tokens that runs through the whole pool; block tables
become the list of its parts that some queries attend to, and a mask knows which position a token
has in whose context.

    pool    │ block 0: K K K V V V … │ block 1: K K K V V V … │ block 2 …
    head 0    ■──────── stride ──────▶ ■                        ■          tokens of this head
    head 1      ■                        ■                        ■        the same, a page later

What lies in the pool must be finite, for a masked cell still takes part as 0 * V: the pool starts
as zeros, and nothing is written to it but what the model computes or a peer sends.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from core.errors import ConfigError, Stage
from engine.model.attention import Span, StepContext
from engine.model.paged import remember

Attend: TypeAlias = Callable[..., Any]
"""`torch.nn.attention.flex_attention.flex_attention`, compiled where it is to be fast."""

QUERY_BLOCK = 64
_UNLIMITED = 1 << 30
_MOST_ELEMENTS = 1 << 31
_NARROWEST = 2
"""Blocks in the narrowest table: torch compiles apart what has a size of 1."""


@dataclass(frozen=True, slots=True)
class Lane:
    """The tokens of one layer, kind (K or V) and head: `block_size` of them every `stride`."""

    blocks: int
    block_size: int
    stride: int

    @staticmethod
    def of(kv: Tensor) -> "Lane":
        return Lane(len(kv), kv.shape[4], kv.stride(0) // kv.shape[5])

    @property
    def length(self) -> int:
        return (self.blocks - 1) * self.stride + self.block_size

    def tokens(self, part: Tensor) -> Tensor:
        """part [blocks, kv_heads, block_size, head_dim] -> [1, kv_heads, length, head_dim], a
        view in which heads overlap."""
        heads, width = part.shape[1], part.shape[3]
        shape, strides = (1, heads, self.length, width), (0, part.stride(1), width, 1)
        return part.as_strided(shape, strides, part.storage_offset())


@dataclass(frozen=True, slots=True)
class Group:
    """Spans of `queries` rows each.  int64: rows [sequences * queries], those of the step;
    tables [sequences, width], padded with the number of blocks in the pool; starts [sequences]."""

    queries: int
    rows: Tensor
    tables: Tensor
    starts: Tensor


class FlexAttention:
    """For one step, or for one recording of steps that find other values in the same tensors."""

    def __init__(
        self,
        kv: Tensor,
        context: StepContext,
        groups: Sequence[Group],
        windows: Sequence[int],
        scale: float,
        attend: Attend,
    ) -> None:
        """kv: the pool.  windows: per layer, 0 for unlimited reach."""
        self._kv = kv
        self._context = context
        self._windows = windows
        self._scale = scale
        self._attend = attend
        self._lane = lane = Lane.of(kv)
        self._groups = {
            window: [(group, block_mask(group, window, lane)) for group in groups]
            for window in sorted(set(windows))
        }

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        remember(self._kv, layer, self._context, key, value)
        keys, values = (self._lane.tokens(self._kv[:, layer, kind]) for kind in (0, 1))
        out = torch.empty_like(query)
        for group, mask in self._groups[self._windows[layer]]:
            rows = query[group.rows].view(-1, group.queries, *query.shape[1:])
            found = self._attend(
                _varying(rows.transpose(1, 2), 0, 2),
                keys,
                values,
                block_mask=mask,
                scale=self._scale,
                enable_gqa=True,
                kernel_options={
                    "BLOCK_M": QUERY_BLOCK,
                    "BLOCK_N": self._lane.block_size,
                    "FORCE_USE_FLEX_ATTENTION": True,
                },
            )
            out[group.rows] = found.transpose(1, 2).flatten(0, 1)
        return out


class FixedFlex:
    """Attention of steps of as many single rows as `context` has, to be recorded once."""

    def __init__(
        self,
        kv: Tensor,
        context: StepContext,
        width: int,
        windows: Sequence[int],
        scale: float,
        attend: Attend,
    ) -> None:
        """context: its tensors hold other cells in each step.  width: of the longest table."""
        self._kv = kv
        self._context = context
        self._windows = windows
        self._scale = scale
        self._attend = attend
        starts = torch.zeros_like(context.offsets)
        tables = starts.new_zeros(len(starts), max(width, _NARROWEST))
        self._group = Group(1, torch.arange(len(starts), device=kv.device), tables, starts)

    def place(self, spans: Sequence[Span]) -> None:
        """Where the rows of the next step are, in order."""
        tables, starts = _tables(spans, self._group.tables.shape[1], len(self._kv))
        self._group.tables.copy_(tables)
        self._group.starts.copy_(starts)

    def attention(self) -> FlexAttention:
        """To be made within the recording: each replay reads the tables anew."""
        return FlexAttention(
            self._kv, self._context, [self._group], self._windows, self._scale, self._attend
        )


def check(kv: Tensor) -> None:
    """Raises ConfigError for a pool that compiled FlexAttention cannot serve: it multiplies whole
    blocks, and counts elements in 32 bits."""
    size, elements = kv.shape[4], len(kv) * kv.stride(0)
    if size < 16 or size & (size - 1):
        raise ConfigError(
            f"kv.block_size: FlexAttention takes powers of two from 16 on, not {size}; "
            "set 16, or install flashinfer",
            stage=Stage.START,
            field="kv.block_size",
        )
    if elements >= _MOST_ELEMENTS:
        raise ConfigError(
            f"kv.memory_mb: FlexAttention reaches {_MOST_ELEMENTS >> 20} Mi elements and the pool "
            f"has {elements >> 20} Mi; ask for less, or install flashinfer",
            stage=Stage.START,
            field="kv.memory_mb",
        )


def groups_of(spans: Sequence[Span], kv: Tensor) -> list[Group]:
    """Spans of one row together, every longer one alone."""
    singles = [span for span in spans if span.queries == 1]
    parts = [[span] for span in spans if span.queries > 1] + ([singles] if singles else [])
    return [_group(part, kv) for part in parts]


def block_mask(group: Group, window: int, lane: Lane) -> BlockMask:
    """Which blocks each QUERY_BLOCK queries attend to, and which tokens in them.

    Made of the group's tensors on their device, which is not waited for.
    """
    tables, starts, queries = group.tables, _varying(group.starts, 0), group.queries
    width = tables.shape[1]
    column = torch.arange(width, device=tables.device)
    first = starts[:, None] + torch.arange(0, queries, QUERY_BLOCK, device=tables.device)
    last = torch.minimum(first + QUERY_BLOCK, starts[:, None] + queries) - 1
    reach = torch.full_like(starts[:1], window or _UNLIMITED)
    lowest = (first - reach + 1).clamp(min=0) // lane.block_size
    index = (lowest[..., None] + column).clamp(max=width - 1)
    blocks = tables[:, None].expand(index.shape).gather(2, index).clamp(max=lane.blocks - 1)
    parts = (blocks * (lane.stride // lane.block_size)).int()
    places = tables.new_full((len(tables), lane.blocks + 1), -1)
    _varying(places, 0).scatter_(1, tables, column.expand_as(tables))

    def sees(b: Tensor, h: Tensor, row: Tensor, token: Tensor) -> Tensor:
        inside = token % lane.stride
        place = places[b, token // lane.stride]
        position, own = place * lane.block_size + inside, starts[b] + row
        real = (place >= 0) & (inside < lane.block_size)
        return real & (position <= own) & (position > own - reach[0])

    return BlockMask.from_kv_blocks(
        _varying((last // lane.block_size - lowest + 1).int()[:, None], 0, 2),
        _varying(parts[:, None], 0, 2, 3),
        BLOCK_SIZE=(QUERY_BLOCK, lane.block_size),
        mask_mod=sees,
        seq_lengths=(queries, lane.length),
        compute_q_blocks=False,
    )


def _group(spans: Sequence[Span], kv: Tensor) -> Group:
    """Of spans of equally many rows."""
    width = max(_NARROWEST, *(len(span.block_ids) for span in spans))
    tables, starts = _tables(spans, width, len(kv))
    rows = torch.tensor([row for span in spans for row in range(span.first_row, span.end_row)])
    return Group(spans[0].queries, rows.to(kv.device), tables.to(kv.device), starts.to(kv.device))


def _tables(spans: Sequence[Span], width: int, padding: int) -> tuple[Tensor, Tensor]:
    """[spans, width] and [spans] int64, in host memory."""
    tables = [[*s.block_ids, *[padding] * (width - len(s.block_ids))] for s in spans]
    return torch.tensor(tables), torch.tensor([span.start for span in spans])


def _varying(x: Tensor, *dimensions: int) -> Tensor:
    """x, of whose users one compilation shall serve all sizes of these dimensions."""
    torch._dynamo.maybe_mark_dynamic(x, dimensions)
    return x
