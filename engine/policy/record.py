"""What a finished step changes, and what the world is told of it."""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

from core.errors import InternalError
from core.messages import Event, PrefillDone, StepEvents, TokenEvent
from core.ports import ReadyBlocks, StepOutput
from core.states import SequenceEvent, SequenceState
from engine.policy.holdings import Holdings
from engine.policy.plan import Plan, Sampled, Work
from engine.policy.sequence import Sequence
from engine.policy.stop import StopRules

_S = SequenceState


@dataclass(slots=True)
class _Outbox:
    """Output of one step while it is gathered: one message of tokens per owner.

    PrefillDone goes first: when the first token is also the last, the request ends with it, and
    what prefill has to account for must have been heard by then.
    """

    tokens: dict[str, list[TokenEvent]] = field(default_factory=dict)
    done: list[tuple[str, Event]] = field(default_factory=list)
    ready: list[ReadyBlocks] = field(default_factory=list)

    def sealed(self) -> StepOutput:
        steps = tuple((o, StepEvents(tuple(events))) for o, events in self.tokens.items())
        return StepOutput(events=(*self.done, *steps), ready=tuple(self.ready))


class StepRecorder:
    """Applies sampled tokens to sequences."""

    def __init__(self, held: Holdings, rules: StopRules) -> None:
        self._held = held
        self._rules = rules

    def record(self, plan: Plan, sampled: Many[Sampled | None], now: float) -> StepOutput:
        """Raises InternalError unless `sampled` has an outcome exactly where the plan asks.

        Sequences that ended while the step ran are passed over: nobody hears of them again.
        """
        asked = [w.sample is not None for w in plan.works]
        if asked != [outcome is not None for outcome in sampled]:
            raise InternalError(f"the runner sampled {sampled} for a plan that asks {asked}")
        out = _Outbox()
        flight = self._held.roster.land()
        for seq, work, outcome in zip(flight, plan.works, sampled, strict=True):
            if seq.state is not _S.DONE:
                self._apply(seq, work, outcome, now, out)
        return out.sealed()

    def _apply(
        self, seq: Sequence, work: Work, outcome: Sampled | None, now: float, out: _Outbox
    ) -> None:
        seq.passed(work)
        self._held.roster.publish(seq)
        if outcome is not None:
            self._sampled(seq, outcome, now, out)
        elif (blocks := self._lend(seq, whole=False)) and blocks.block_ids:
            out.ready.append(blocks)

    def _sampled(self, seq: Sequence, outcome: Sampled, now: float, out: _Outbox) -> None:
        token = outcome.token
        seq.tokens.append(token)
        finish = self._rules.finish(seq.sampling, token, seq.emitted, len(seq.tokens))
        logprobs = () if outcome.logprobs is None else (outcome.logprobs,)
        event = TokenEvent(seq.key, seq.emitted, (token,), finish, logprobs)
        seq.emitted += 1
        self._held.totals.generated_tokens += 1
        out.tokens.setdefault(seq.owner, []).append(event)
        first = seq.first_token_at is None
        if first:
            seq.first_token_at = now
        if first and (seq.local or finish):
            out.done.append((seq.owner, _prefill_done(seq, event, outcome.expert_counts)))
        if finish:
            self._held.roster.end(seq)
        elif seq.state is _S.PREFILLING and seq.local:
            seq.advance(SequenceEvent.PREFILLED)
        elif blocks := self._lend(seq, whole=True):
            seq.advance(SequenceEvent.HAND_OVER)
            counts = outcome.expert_counts
            out.ready.append(replace(blocks, first=event, expert_counts=counts))

    def _lend(self, seq: Sequence, whole: bool) -> ReadyBlocks | None:
        """Lend to the mover what became final and the destination has not.  None: stays here."""
        if seq.grant is None:
            return None
        start = seq.sent
        final = len(seq.block_ids) if whole else seq.computed // self._held.config.block_size
        ids = tuple(seq.block_ids[start:final])
        self._held.lending.lend(seq.key, ids)
        seq.sent += len(ids)
        queue_s, prefill_s = _durations(seq)
        return ReadyBlocks(
            key=seq.key,
            owner=seq.owner,
            grant=seq.grant,
            first_index=start,
            block_ids=ids,
            generations=self._held.pool.generations_of(ids),
            last=whole,
            cached_tokens=seq.cached_tokens,
            queue_s=queue_s,
            prefill_s=prefill_s,
        )


def _prefill_done(seq: Sequence, first: TokenEvent, counts: tuple[int, ...]) -> PrefillDone:
    queue_s, prefill_s = _durations(seq)
    return PrefillDone(
        key=seq.key,
        first=first,
        cached_tokens=seq.cached_tokens,
        expert_counts=counts,
        queue_s=queue_s,
        prefill_s=prefill_s,
    )


def _durations(seq: Sequence) -> tuple[float, float]:
    """(queue_s, prefill_s), the latter 0 before the first token."""
    started = seq.arrival if seq.started_at is None else seq.started_at
    first = started if seq.first_token_at is None else seq.first_token_at
    return started - seq.arrival, first - started
