"""The pass of one step through the model, in which a work may pass fewer layers than others.

layers 0 … 9      d d d d │ prompt ....   one stage: the works that pass these layers together
layers 10 … 29    d d d d │               the next one; the prompt goes on in the next step
"""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from core.errors import InternalError, Stage
from core.ids import AttemptKey
from engine.device.backend import Backend
from engine.device.batch import Batch, Part, part_of
from engine.device.experts import ExpertLog
from engine.device.pool import KVPool
from engine.model.attention import Attention
from engine.model.decoder import Decoder
from engine.policy.plan import Plan, Work


class Forward:
    """Keeps the hidden states of works between two layers, from one step to the next only: a work
    that the next plan does not go on with was cancelled or preempted, and is forgotten."""

    def __init__(self, model: Decoder, pool: KVPool, backend: Backend) -> None:
        self._model = model
        self._pool = pool
        self._backend = backend
        self._kept: dict[AttemptKey, Tensor] = {}

    def __call__(self, plan: Plan, batch: Batch) -> Tensor:
        """[T, hidden]; the rows of incomplete works mean nothing.  Writes K/V, and expert counts
        once all has gone well.

        Raises InternalError for a work that starts at a layer where the last step left none.
        """
        spans = batch.context.spans
        x = self._model.embed(batch.token_ids)
        for work, span in zip(plan.works, spans, strict=True):
            if work.layers is not None and work.layers.start:
                x[span.rows] = self._kept_of(work)
        self._pass(plan.works, batch, x)
        self._kept = {
            work.key: x[span.rows]
            for work, span in zip(plan.works, spans, strict=True)
            if not work.is_complete
        }
        return x

    def _pass(self, works: Sequence[Work], batch: Batch, x: Tensor) -> None:
        """x, in place, stage by stage.  Stages of the same works share their attention."""
        ready: dict[tuple[int, ...], tuple[Part, Attention]] = {}
        logs: list[tuple[ExpertLog, Part, int]] = []
        moe_layers = self._model.config.moe_layers
        for layers in stages(works, self._model.config.layers):
            passing = tuple(i for i, work in enumerate(works) if _passes(work, layers))
            if passing not in ready:
                ready[passing] = self._prepare(batch, passing)
            part, attention = ready[passing]
            log = ExpertLog() if any(i in layers for i in moe_layers) else None
            rows = x[part.rows]
            x[part.rows] = self._model.advance(rows, part.positions, attention, layers, log)
            if log is not None:
                logs.append((log, part, sum(i < layers.start for i in moe_layers)))
        for log, part, first in logs:
            log.store(self._pool.expert_counts, part.context, self._experts, first)

    def _prepare(self, batch: Batch, passing: tuple[int, ...]) -> tuple[Part, Attention]:
        part = part_of(batch, passing)
        return part, self._backend.attention(self._model.config, self._pool, part.context)

    @property
    def _experts(self) -> int:
        return self._model.config.moe.experts if self._model.config.moe else 0

    def _kept_of(self, work: Work) -> Tensor:
        kept = self._kept.get(work.key)
        if kept is None or len(kept) != len(work.token_ids):
            raise InternalError(
                f"work of {work.key} goes on in the middle of the layers, where the step before"
                " left nothing of it; the scheduler must go on in the very next plan",
                stage=Stage.PREFILL,
            )
        return kept


def stages(works: Sequence[Work], layers: int) -> list[range]:
    """The layers, cut wherever a work begins or stops; ranges that nothing passes left out."""
    groups = [work.layers for work in works if work.layers is not None]
    cuts = sorted({0, layers}.union(*((g.start, g.stop) for g in groups)))
    ranges = [range(start, stop) for start, stop in pairwise(cuts)]
    return [r for r in ranges if any(_passes(work, r) for work in works)]


def _passes(work: Work, layers: range) -> bool:
    if work.layers is None:
        return True
    return work.layers.start <= layers.start and layers.stop <= work.layers.stop
