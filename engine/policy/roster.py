"""All live sequences of an engine, in order of arrival.  Who waits and who runs is their state.

A preempted sequence keeps its place, so it starts again ahead of everything newer.
"""

from collections.abc import Iterable, Iterator

from core.errors import InternalError
from core.ids import AttemptKey, BlockId
from core.states import SequenceEvent, SequenceState
from engine.policy.blocks import BlockPool
from engine.policy.plan import Work
from engine.policy.sequence import Sequence


class Roster:
    """Owner of the sequences and, through them, of their references to blocks.

    Blocks of a sequence that ends while a step runs on them stay held until the step is over.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._live: dict[AttemptKey, Sequence] = {}
        self._flight: tuple[Sequence, ...] = ()

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._live.values())

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._live

    def get(self, key: AttemptKey) -> Sequence | None:
        return self._live.get(key)

    def add(self, seq: Sequence) -> None:
        if seq.key in self._live:
            raise InternalError(f"attempt {seq.key} is here already")
        self._live[seq.key] = seq

    def in_state(self, *states: SequenceState) -> list[Sequence]:
        return [s for s in self._live.values() if s.state in states]

    def publish(self, seq: Sequence) -> None:
        """Let others match those of its blocks that became full since the last time."""
        full = seq.computed // self._block_size
        if full > seq.published:
            hashes = seq.chain.first(full, seq.tokens)
            for i in range(seq.published, full):
                self._pool.publish(seq.block_ids[i], hashes[i])
            seq.published = full

    def preempt(self, seq: Sequence) -> None:
        """Give up its blocks; its prompt and outputs are computed again later."""
        seq.advance(SequenceEvent.PREEMPT)
        self._pool.release(seq.block_ids)
        seq.block_ids = []
        seq.computed = 0
        seq.partial = None

    def end(self, seq: Sequence) -> None:
        """The sequence is no more.  Raises InternalError if it had ended before."""
        seq.advance(SequenceEvent.END)
        del self._live[seq.key]
        if not seq.in_flight:
            self._pool.release(seq.block_ids)

    def take_off(self, works: Iterable[Work]) -> None:
        """A step over these works begins; the one before has landed."""
        self._flight = tuple(self._live[work.key] for work in works)
        for seq in self._flight:
            seq.in_flight = True

    def land(self) -> tuple[Sequence, ...]:
        """The step is over.  Its sequences in order of its works; those DONE ended under way."""
        flight, self._flight = self._flight, ()
        for seq in flight:
            seq.in_flight = False
            if seq.state is SequenceState.DONE:
                self._pool.release(seq.block_ids)
        return flight

    def tables(self) -> Iterator[list[BlockId]]:
        """Every block table that holds references."""
        yield from (s.block_ids for s in self)
        yield from (s.block_ids for s in self._flight if s.state is SequenceState.DONE)
