"""Sequences that wait for their grammar to be compiled, as the scheduler sees them."""

from dataclasses import dataclass
from typing import Protocol

from core.errors import BadRequest, Stage, TriremeError
from core.messages import AttemptFailed, Fault
from core.sampling import Grammar
from core.states import SequenceState
from engine.policy.holdings import Holdings
from engine.policy.sequence import Sequence

_S = SequenceState


@dataclass(frozen=True, slots=True)
class GrammarState:
    """ready: it can be followed.  error: why it cannot.  Neither: it is on its way."""

    ready: bool = False
    error: TriremeError | None = None


READY, PENDING = GrammarState(ready=True), GrammarState()


class GrammarPort(Protocol):
    """The compiled grammars of a worker."""

    def state(self, grammar: Grammar, now: float) -> GrammarState:
        """Never waits; asking for an unknown one has it compiled.  One that is ready stays so
        while it is asked for before every step."""
        ...


class NoGrammars:
    """`GrammarPort` of an engine that serves none."""

    def state(self, grammar: Grammar, now: float) -> GrammarState:
        why = "this worker serves no structured output; leave response_format out"
        return GrammarState(error=BadRequest(why, stage=Stage.QUEUE, field="response_format"))


class GrammarWatch:
    """Marks who has to wait, and ends who waits in vain."""

    def __init__(self, held: Holdings, port: GrammarPort) -> None:
        self._held = held
        self._port = port
        self._hopeless: list[tuple[Sequence, TriremeError]] = []

    def look(self, now: float) -> None:
        """Before a step is planned.  What has started to prefill goes on: it was ready then, and
        asking keeps it so."""
        for seq in self._held.roster.in_state(_S.WAITING, _S.PREFILLING, _S.RUNNING):
            if seq.sampling.grammar is None:
                continue
            state = self._port.state(seq.sampling.grammar, now)
            seq.awaits_grammar = not state.ready
            if state.error is not None:
                self._hopeless.append((seq, state.error))

    def end_hopeless(self) -> list[tuple[str, AttemptFailed]]:
        """(owner, event) of those whose grammar cannot be had.  Not while a step runs."""
        hopeless, self._hopeless = self._hopeless, []
        events = []
        for seq, error in hopeless:
            if seq.state is not _S.DONE:
                self._held.roster.end(seq)
                self._held.totals.grammars_failed += 1
                fault = Fault.of(error, self._held.config.worker_id)
                events.append((seq.owner, AttemptFailed(seq.key, fault)))
        return events
