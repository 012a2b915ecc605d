"""Every value that crosses a process.  Frozen, no live objects, no torch; tokens are ids (int).

Router -> worker calls (each answered):   Reserve -> Grant,  Prefill -> Accepted,
                                          Attach -> Accepted,  Cancel -> Accepted
Router -> worker notice:                  Renew
Worker -> router events:                  StepEvents, PrefillDone, AttemptFailed, WorkerReport
Worker -> worker notice:                  Abort
Any call may be answered by a Fault.  `transport/proto/worker.proto` mirrors these classes field
by field; a golden test keeps the two alike.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from core.errors import BY_CODE, InternalError, Stage, TriremeError
from core.ids import AttemptKey, Epoch, LeaseId, WorkerId
from core.kvlayout import Compatibility
from core.sampling import Sampling, TokenLogprobs

WIRE_VERSION = 2


class Role(StrEnum):
    """What the planner wants a worker for.  Every worker can do everything."""

    PREFILL = "prefill"
    DECODE = "decode"
    HYBRID = "hybrid"

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


MAX_GRAMMAR_BYTES = 64 << 10
"""Of UTF-8, in the source of a grammar."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask a decode worker for blocks that will hold the KV of `tokens`."""

    key: AttemptKey
    tokens: tuple[int, ...]
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Grant:
    """Blocks are reserved.  The first `present_blocks` of them already hold the right KV."""

    key: AttemptKey
    lease_id: LeaseId
    epoch: Epoch
    worker_id: WorkerId
    address: str
    blocks: int
    present_blocks: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute the KV of `tokens` and sample output token number `emitted`.

    tokens = prompt + the `emitted` output tokens that earlier attempts produced.
    With a grant the KV moves there and this worker is done; without, it decodes to the end.
    """

    key: AttemptKey
    tokens: tuple[int, ...]
    sampling: Sampling
    emitted: int = 0
    salt: str = ""
    grant: Grant | None = None


@dataclass(frozen=True, slots=True)
class Attach:
    """Decode on from a filled lease: its tokens plus `token`, the output number emitted - 1."""

    key: AttemptKey
    lease_id: LeaseId
    epoch: Epoch
    token: int
    emitted: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Cancel:
    """Forget everything filed under `key`.  Idempotent; also releases a lease."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Accepted:
    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Renew:
    """All attempts on this worker that the sender still wants; others of its own expire."""

    keys: tuple[AttemptKey, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """The sending half of a hand-over gave up; the lease will not be filled."""

    key: AttemptKey
    lease_id: LeaseId
    reason: str


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Output tokens number `index`, `index` + 1, … of a request; `finish` on the last event.

    logprobs: one per token where the request asked for them, else empty.
    """

    key: AttemptKey
    index: int
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepEvents:
    """All token events of one engine step for one receiver."""

    events: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The prompt is computed and, with a grant, its KV has landed.  Durations in seconds.

    `first` repeats the sampled token, so that a lost StepEvents cannot stall the hand-over.
    cached_tokens: prompt tokens whose KV came from this worker's prefix cache.
    expert_counts: [MoE layer x expert], how often the tokens computed so far chose each expert;
    empty for a dense model.
    """

    key: AttemptKey
    first: TokenEvent
    cached_tokens: int
    expert_counts: tuple[int, ...] = ()
    moved_blocks: int = 0
    moved_bytes: int = 0
    mover: str = ""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A `TriremeError` as a value."""

    code: str
    message: str
    stage: Stage = Stage.EDGE
    worker: str = ""
    retry_after_s: float = 0.0
    field: str = ""

    @staticmethod
    def of(error: TriremeError, worker: str = "") -> "Fault":
        return Fault(
            error.code,
            error.message,
            error.stage,
            error.worker or worker,
            error.retry_after_s,
            error.field,
        )

    def error(self) -> TriremeError:
        kind = BY_CODE.get(self.code, InternalError)
        return kind(
            self.message,
            stage=self.stage,
            worker=self.worker,
            retry_after_s=self.retry_after_s,
            field=self.field,
        )


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """The worker gives this attempt up; nothing is held for it any more."""

    key: AttemptKey
    fault: Fault


@dataclass(frozen=True, slots=True)
class Counter:
    name: str
    value: int


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """State of a worker, pushed on change and at least every 200 ms.  *_total only grow.

    free_blocks counts blocks that an allocation can have, cached ones that nobody uses included.
    counters: named totals (preemptions, expired leases, transfer fall-backs, …).
    """

    worker_id: WorkerId
    role: Role
    epoch: Epoch
    draining: bool = False
    total_blocks: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    leased_blocks: int = 0
    lent_blocks: int = 0
    quarantined_blocks: int = 0
    waiting: int = 0
    running: int = 0
    held: int = 0
    queued_tokens: int = 0
    running_tokens: int = 0
    step_ms: float = 0.0
    steps_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    counters: tuple[Counter, ...] = ()


@dataclass(frozen=True, slots=True)
class DataEndpoint:
    """Where a mover listens: backend name and address (tcp "host:port", shm socket name)."""

    mover: str
    address: str


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What decides which movers can join two processes."""

    boot_id: str
    uid: int
    pid: int


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker as membership knows it.  rank_pids: its processes, the leader's first.

    weights: how it stores matrices.  kv_variant: see Compatibility.  lossy: what makes its
    answers others than the model's own, "" when nothing does.
    """

    worker_id: WorkerId
    role: Role
    epoch: Epoch
    address: str
    model: str = ""
    max_model_len: int = 0
    total_blocks: int = 0
    block_size: int = 0
    rank_pids: tuple[int, ...] = ()
    weights: str = ""
    kv_variant: str = ""
    lossy: str = ""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message on a session.  `epoch` is whom the caller wants to reach; 0 is anybody.

    compat is absent when the caller is a router, which holds no KV.
    """

    wire_version: int
    sender: str
    epoch: Epoch
    compat: Compatibility | None = None
    host: HostFacts | None = None


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to Hello.  `link_key` opens data connections of this session's peer."""

    info: WorkerInfo
    compat: Compatibility
    host: HostFacts
    endpoints: tuple[DataEndpoint, ...]
    link_key: bytes


Call: TypeAlias = Hello | Reserve | Prefill | Attach | Cancel
Reply: TypeAlias = Welcome | Grant | Accepted | Fault
Notice: TypeAlias = Renew | Abort
Event: TypeAlias = StepEvents | PrefillDone | AttemptFailed | WorkerReport
Message: TypeAlias = Call | Reply | Notice | Event
