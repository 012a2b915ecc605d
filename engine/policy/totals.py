"""Counters of one scheduler.  They only grow."""

from dataclasses import dataclass, fields

from core.messages import Counter


@dataclass(slots=True)
class Totals:
    """Requests, except: steps; *_tokens in tokens; quarantined_total in blocks.

    preemptions: sequences that lost their blocks and are computed again.
    shared_prefix_waits: waited for another prompt to compute blocks that both begin with.
    expired, leases_expired: dropped because nobody renewed them.
    failed: were in a step that the runner could not execute.
    grammars_failed: ended because what they had to match could not be compiled or followed.
    leases_aborted: the sending half of the hand-over gave up.
    quarantined_total: blocks of leases that ended while a write to them was landing.
    """

    preemptions: int = 0
    shared_prefix_waits: int = 0
    expired: int = 0
    failed: int = 0
    grammars_failed: int = 0
    cancelled: int = 0
    refused: int = 0
    leases_granted: int = 0
    leases_expired: int = 0
    leases_aborted: int = 0
    quarantined_total: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    def counters(self) -> tuple[Counter, ...]:
        """Those that have no field of their own in `WorkerReport`."""
        own = ("steps", "prompt_tokens", "cached_tokens", "generated_tokens")
        names = (f.name for f in fields(self) if f.name not in own)
        return tuple(Counter(name, getattr(self, name)) for name in names)
