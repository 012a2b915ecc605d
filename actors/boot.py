"""What a worker process needs to start, as one value."""

from dataclasses import dataclass

from core.ids import Epoch, WorkerId
from core.messages import Role
from core.spec import ClusterSpec


@dataclass(frozen=True, slots=True)
class WorkerBoot:
    """threads: torch threads; blocks: KV blocks, 0 for as many as spec.kv.memory_mb holds.

    host: the address of this machine that sessions and data links listen on and peers use.
    """

    worker_id: WorkerId
    role: Role
    epoch: Epoch
    spec: ClusterSpec
    threads: int = 1
    blocks: int = 0
    host: str = "127.0.0.1"
