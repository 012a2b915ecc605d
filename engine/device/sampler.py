"""Choosing tokens from logits, for a whole batch at once.

    logits ─▶ grammar ─▶ bans ─▶ bias ─▶ penalties ─▶ greedy: argmax
       │             (engine.device.logits)        └▶ at random: engine.device.draw
       └─▶ logprobs (engine.device.logprobs)

Order as in vLLM.  Everything a row's token depends on is its own logits and its own `SampleAt`.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

from torch import Tensor

from core.errors import InternalError, Stage
from engine.device import logits as change
from engine.device.draw import draw
from engine.device.logprobs import logprobs
from engine.policy.plan import SampleAt, Sampled


class GrammarMasks(Protocol):
    """Says what grammars allow next."""

    def mask(self, asks: Sequence[SampleAt]) -> Tensor | None:
        """int32 [S, ceil(vocab / 32)] in xgrammar's packing, each row with at least one bit set;
        all bits in rows without a grammar.  None: no row has one."""
        ...


class Sampler:
    """Immutable.  A batch that asks for nothing but the likeliest tokens costs one argmax."""

    def __init__(self, eos_ids: Collection[int], grammar: GrammarMasks | None = None) -> None:
        self._eos_ids = frozenset(eos_ids)
        self._grammar = grammar

    def sample(self, logits: Tensor, asks: Sequence[SampleAt]) -> list[Sampled]:
        """logits [S, vocab] float32 -> S outcomes.  Temperature 0 is argmax: of equal logits the
        lowest id.  Raises InternalError for a grammar that nobody here can follow."""
        if not asks:
            return []
        steered = self._steered(logits, asks)
        tokens: list[int] = steered.argmax(dim=-1).tolist()
        drawn = [i for i, ask in enumerate(asks) if ask.sampling.temperature > 0]
        if drawn:
            for i, token in zip(drawn, draw(steered[drawn], [asks[i] for i in drawn]), strict=True):
                tokens[i] = token
        told = logprobs(logits, tokens, asks)
        return [Sampled(token, told.get(i)) for i, token in enumerate(tokens)]

    def _steered(self, logits: Tensor, asks: Sequence[SampleAt]) -> Tensor:
        """The logits to choose from; `logits` itself where no ask changes any."""
        bans = [change.banned(ask, self._eos_ids) for ask in asks]
        ruled = [i for i, ask in enumerate(asks) if ask.sampling.grammar is not None]
        biased = any(ask.sampling.logit_bias for ask in asks)
        penalised = any(ask.sampling.penalises for ask in asks)
        if not (ruled or any(bans) or biased or penalised):
            return logits
        steered = logits.clone()
        if ruled:
            change.restrict(steered, self._mask(asks), ruled)
        if any(bans):
            change.forbid(steered, bans)
        if biased:
            change.bias(steered, asks)
        if penalised:
            change.penalise(steered, asks)
        return steered

    def _mask(self, asks: Sequence[SampleAt]) -> Tensor:
        mask = None if self._grammar is None else self._grammar.mask(asks)
        if mask is None:
            raise InternalError(
                "a grammar is asked for and this worker has no masks for it; report this",
                stage=Stage.DECODE,
            )
        return mask
