"""What the grammars of a batch allow next: `engine.device.sampler.GrammarMasks`."""

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from core.clock import Clock
from core.ids import AttemptKey
from core.sampling import Grammar
from engine.grammar.follower import Follower
from engine.grammar.shelf import IN_USE_S, GrammarShelf
from engine.policy.plan import SampleAt

_WORD_BITS = 32
STEP_CPU_S = 0.05
REPLAY_CPU_S = 0.001
"""What a step may cost an output, and each token of one that is followed anew.  Ambiguous grammars
cost more with every token, and the rest of the batch waits for them."""


class _Whose(NamedTuple):
    key: AttemptKey | None
    grammar: Grammar


class _Open(NamedTuple):
    follower: Follower
    used: float


class GrammarBook:
    """For the engine's thread.  Follows running sequences from step to step; one that is not asked
    about for a while is forgotten, and followed anew from its output if it comes back."""

    def __init__(
        self,
        shelf: GrammarShelf,
        vocab_size: int,
        eos_ids: Iterable[int],
        clock: Clock = time.monotonic,
        cpu: Clock = time.thread_time,
    ) -> None:
        """vocab_size: width of the logits.  cpu: seconds that this thread has computed."""
        self._shelf = shelf
        self._words = -(-vocab_size // _WORD_BITS)
        self._ends = self._bits(eos_ids)
        self._clock = clock
        self._cpu = cpu
        self._open: OrderedDict[_Whose, _Open] = OrderedDict()

    def mask(self, asks: Sequence[SampleAt]) -> Tensor | None:
        """int32 [S, ceil(vocab / 32)] in xgrammar's packing, each row with at least one bit set;
        all bits in rows without a grammar.  None: no row has one.

        Raises InternalError for a grammar that the shelf does not call ready.
        """
        if all(ask.sampling.grammar is None for ask in asks):
            return None
        mask = torch.full((len(asks), self._words), -1, dtype=torch.int32)
        for row, ask in zip(mask, asks, strict=True):
            if ask.sampling.grammar is not None:
                self._fill(row, ask, ask.sampling.grammar)
        self._forget()
        return mask

    def _fill(self, row: Tensor, ask: SampleAt, grammar: Grammar) -> None:
        started = self._cpu()
        follower = self._follower(_Whose(ask.key, grammar))
        replayed = follower.follow(ask.tokens[ask.prompt :])
        follower.fill(row, self._ends, self._bits(ask.sampling.stop_token_ids))
        took = self._cpu() - started
        if took > STEP_CPU_S + REPLAY_CPU_S * replayed:
            self._shelf.condemn(grammar, f"is too slow to follow ({took:.2f} s); simplify it")

    def _follower(self, whose: _Whose) -> Follower:
        known = self._open.pop(whose, None)
        follower = known.follower if known else Follower(self._shelf.matcher(whose.grammar))
        self._open[whose] = _Open(follower, self._clock())
        return follower

    def _forget(self) -> None:
        """A follower keeps its grammar in memory."""
        now = self._clock()
        while now - next(iter(self._open.values())).used > IN_USE_S:
            self._open.popitem(last=False)

    def _bits(self, ids: Iterable[int]) -> Tensor:
        """int32 [ceil(vocab / 32)] with the bits of these tokens set."""
        bits = torch.zeros(self._words, dtype=torch.int64)
        for token in ids:
            bits[token // _WORD_BITS] |= 1 << token % _WORD_BITS
        return bits.to(torch.int32)
