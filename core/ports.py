"""What engine, transport and router ask of each other.  They meet here and nowhere else."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from core.ids import AttemptKey, BlockId, Epoch, LeaseId, WorkerId
from core.kvlayout import KVLayout
from core.messages import (
    Attach,
    Call,
    Event,
    Grant,
    Notice,
    Prefill,
    Reply,
    Reserve,
    TokenEvent,
    WorkerInfo,
    WorkerReport,
)


class Tokenizer(Protocol):
    """Text <-> ids.  Pure CPU; thread-safe."""

    eos_ids: frozenset[int]
    vocab_size: int
    longest_token: int
    """Bytes of UTF-8 that one token stands for, at most: long texts are refused unread."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; text that spells a special token becomes that token."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes the token adds to the output; b"" for a special token."""
        ...

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """The model's chat template over the messages, ending where the answer starts."""
        ...


# --------------------------------------------------------------------------- data plane


class Arena(Protocol):
    """A worker's KV memory: generation table first, then blocks, in one shareable mapping."""

    @property
    def fd(self) -> int: ...
    @property
    def generations(self) -> memoryview:
        """Format 'Q', one per block, bumped whenever the block changes hands."""
        ...

    @property
    def blocks(self) -> memoryview:
        """Format 'B', block i at [i * block_bytes, (i + 1) * block_bytes)."""
        ...


@dataclass(frozen=True, slots=True)
class Ticket:
    """What to move: source blocks to the places first_index, first_index + 1, … of a lease.

    The destination maps places to its own block ids, so a sender cannot name a foreign block.
    """

    key: AttemptKey
    lease_id: LeaseId
    epoch: Epoch
    first_index: int
    block_ids: tuple[BlockId, ...]
    generations: tuple[int, ...]


class MoveState(StrEnum):
    DONE = "done"
    GONE = "gone"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class MoveReport:
    """The mover's terminal word on a ticket: after it, no byte of it is read or written.

    GONE: the destination no longer has the lease.  FAILED: anything else; `reason` says what.
    """

    state: MoveState
    mover: str
    bytes: int = 0
    reason: str = ""


class Link(Protocol):
    """A data connection to one peer, of one backend.  One push at a time per link."""

    @property
    def name(self) -> str: ...

    def push(self, ticket: Ticket, deadline_s: float) -> MoveReport:
        """Blocks until the terminal report.  Never raises; a broken link reports FAILED."""
        ...

    def close(self) -> None:
        """Returns when no byte can land any more."""
        ...


class Landing(Protocol):
    """The destination's say over its own memory.  Thread-safe.  Implemented by the engine."""

    def begin(
        self, lease_id: LeaseId, epoch: Epoch, first_index: int, count: int
    ) -> tuple[BlockId, ...]:
        """Blocks that may now be written.  Raises LeaseGone.  Pairs with exactly one `end`."""
        ...

    def end(self, lease_id: LeaseId, first_index: int, count: int, ok: bool) -> None:
        """The write has landed (ok) or never will; after this no byte lands for it."""
        ...


# ------------------------------------------------------------------------------- engine


@dataclass(frozen=True, slots=True)
class ReadyBlocks:
    """Blocks of a running prefill that are final and lent out until `Engine.moved`.

    last: the prefill is over; `first` then carries the sampled token, `expert_counts` those of
    the prompt, and block_ids may be empty when the destination had everything.
    """

    key: AttemptKey
    owner: str
    grant: Grant
    first_index: int
    block_ids: tuple[BlockId, ...]
    generations: tuple[int, ...]
    last: bool = False
    first: TokenEvent | None = None
    cached_tokens: int = 0
    expert_counts: tuple[int, ...] = ()
    queue_s: float = 0.0
    prefill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one engine step, or one command, has to tell the world.

    events: (owner, event) in order; the owner is the session that the attempt came by.
    """

    events: tuple[tuple[str, Event], ...] = ()
    ready: tuple[ReadyBlocks, ...] = ()


class EnginePort(Protocol):
    """A model on a device, as the worker service drives it.  Every method is thread-safe,
    short, and returns between two steps at the latest; tokens come out through the sink
    that the engine was built with (`Callable[[StepOutput], None]`, called on its thread)."""

    @property
    def layout(self) -> KVLayout: ...
    @property
    def landing(self) -> Landing: ...

    def reserve(self, ask: Reserve, owner: str) -> Grant:
        """Raises Refused (no blocks, draining), BadRequest (longer than the model allows)."""
        ...

    def prefill(self, job: Prefill, owner: str) -> None:
        """Queue the job.  Raises Refused, BadRequest."""
        ...

    def attach(self, job: Attach, owner: str) -> None:
        """Decode on.  Raises LeaseGone when the lease ended or is not completely filled."""
        ...

    def cancel(self, key: AttemptKey, owner: str | None = None) -> bool:
        """Forget `key`; False when there was nothing, or nothing of this owner's (None: anyone's).
        No step that starts after this returns has an event for it."""
        ...

    def renew(self, keys: Sequence[AttemptKey], owner: str) -> None: ...

    def drop_owner(self, owner: str) -> int:
        """The session ended: cancel all it owned; how many that was."""
        ...

    def moved(self, key: AttemptKey, block_ids: Sequence[BlockId], last: bool) -> None:
        """The mover's terminal report came for these lent blocks."""
        ...

    def holds(self, key: AttemptKey) -> bool:
        """Whether the attempt is live here: neither ended nor cancelled."""
        ...

    def drain(self) -> None:
        """Refuse new work; what runs goes on."""
        ...

    def report(self) -> WorkerReport: ...


# ------------------------------------------------------------------------------- router


class WorkerPort(Protocol):
    """A worker as the router speaks to it: one live session."""

    @property
    def info(self) -> WorkerInfo: ...

    async def call(self, message: Call, timeout_s: float) -> Reply:
        """Send and await the answer.  Raises WorkerLost, DeadlineExceeded, or the error that
        a Fault carries (Refused, LeaseGone, BadRequest, …)."""
        ...

    async def notify(self, message: Notice) -> None:
        """Send without an answer.  Raises WorkerLost."""
        ...


class FleetListener(Protocol):
    """What the router's request table is told, on the event loop."""

    def on_event(self, worker_id: WorkerId, event: Event) -> None: ...
    def on_lost(self, worker_id: WorkerId, epoch: Epoch, reason: str) -> None: ...


class Fleet(Protocol):
    """The workers a router has a live session with."""

    def ports(self) -> Iterator[WorkerPort]: ...
    def port(self, worker_id: WorkerId) -> WorkerPort | None: ...
    def listen(self, listener: FleetListener) -> None: ...
