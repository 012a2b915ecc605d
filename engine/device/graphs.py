"""Decode steps as recordings: kernels that cost Python more to launch than the device to run.

A recording is of a number of rows; a step with fewer is padded with rows that write to a block of
the pool which is in nobody's table.  Inputs are copied to where the recording reads them:

    plan ─▶ Batch ─▶ inputs of the recording ─▶ replay ─▶ hidden states of the rows that count
                └──▶ FixedAttention.place

Steps with prompt chunks, and those too large for any recording, are computed as they come.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from core.ids import BlockId
from engine.device.backend import Backend
from engine.device.batch import Batch
from engine.device.forward import Forward
from engine.device.pool import KVPool
from engine.model.attention import Attention, Span, StepContext
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.policy.plan import Plan

Record: TypeAlias = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""body -> replay, which does what body did, to the same tensors with whatever is in them then.
What it gives is good until the next replay of any recording."""


class FixedAttention(Protocol):
    """Attention of steps of a fixed number of single rows."""

    def place(self, spans: Sequence[Span]) -> None:
        """Before the recording and before each replay: where the rows are, in order."""
        ...

    def attention(self) -> Attention:
        """To be made and used within the recording."""
        ...


class RecordableBackend(Backend, Protocol):
    def fixed(
        self, config: ModelConfig, pool: KVPool, context: StepContext, width: int
    ) -> FixedAttention:
        """context: without spans; its tensors stay, and hold other cells in each step.
        width: blocks in the longest table."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """rows: of the largest recording.  width: blocks in the longest table of a recorded step.
    spare: a block of the pool that is in no table."""

    rows: int
    width: int
    spare: BlockId

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each recording, the largest first: the others fit in its memory."""
        powers = [1 << n for n in range(self.rows.bit_length()) if 1 << n < self.rows]
        return (self.rows, *reversed(powers))


class GraphedForward:
    """`Forward`, with decode steps recorded.  Not for models with experts: how many tokens each
    has is known to the device alone."""

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        backend: RecordableBackend,
        record: Record,
        limits: Limits,
    ) -> None:
        self._plain = Forward(model, pool, backend)
        self._parts = (model, pool, backend, record)
        self._limits = limits
        self._recordings: dict[int, Recording] = {}

    def record(self, progress: Callable[[str], None]) -> None:
        """For start-up; until then every step is computed as it comes.  Raises RuntimeError."""
        sizes = self._limits.sizes
        with torch.inference_mode():
            for done, size in enumerate(sizes, 1):
                progress(f"recording decode steps, {done} of {len(sizes)}")
                self._recordings[size] = Recording(size, *self._parts, self._limits)

    def __call__(self, plan: Plan, batch: Batch) -> Tensor:
        """As `Forward`; what it gives is good until the next step."""
        recording = self._recording(plan)
        return self._plain(plan, batch) if recording is None else recording.run(batch)

    def _recording(self, plan: Plan) -> "Recording | None":
        for work in plan.works:
            if len(work.token_ids) > 1 or work.layers or len(work.block_ids) > self._limits.width:
                return None
        fitting = [size for size in self._recordings if size >= len(plan.works)]
        return self._recordings[min(fitting)] if fitting else None


class Recording:
    """Steps of `rows` single rows or fewer."""

    def __init__(
        self,
        rows: int,
        model: Decoder,
        pool: KVPool,
        backend: RecordableBackend,
        record: Record,
        limits: Limits,
    ) -> None:
        self._model = model
        self._spare = limits.spare
        self._token_ids, self._positions, block_ids, offsets = torch.zeros(
            4, rows, dtype=torch.int64, device=backend.device
        )
        self._cells = StepContext((), block_ids, offsets)
        self._attention = backend.fixed(model.config, pool, self._cells, limits.width)
        self._pad(0)
        self._attention.place(self._padding(0))
        self._replay = record(self._body)

    def run(self, batch: Batch) -> Tensor:
        """[T, hidden].  Writes K/V."""
        rows, context = len(batch.token_ids), batch.context
        self._token_ids[:rows] = batch.token_ids
        self._positions[:rows] = batch.positions
        self._cells.block_ids[:rows] = context.block_ids
        self._cells.offsets[:rows] = context.offsets
        self._pad(rows)
        self._attention.place([*context.spans, *self._padding(rows)])
        return self._replay()[:rows]

    def _body(self) -> Tensor:
        attention = self._attention.attention()
        return self._model.hidden(self._token_ids, self._positions, attention)

    def _pad(self, first: int) -> None:
        """From this row on: the first token of a sequence in the spare block."""
        for each in (self._token_ids, self._positions, self._cells.offsets):
            each[first:] = 0
        self._cells.block_ids[first:] = self._spare

    def _padding(self, first: int) -> list[Span]:
        return [Span(row, 1, 0, (self._spare,)) for row in range(first, len(self._token_ids))]
