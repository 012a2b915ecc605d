"""What a worker process, and each further rank of one, needs to start: one value."""

from dataclasses import dataclass

from core.ids import Epoch, WorkerId
from core.messages import Role
from core.spec import ClusterSpec, PoolSpec


@dataclass(frozen=True, slots=True)
class WorkerBoot:
    """threads: torch threads of each rank; blocks: KV blocks, 0 for as many as spec.kv.memory_mb
    holds.  pool: its place in spec.pools.

    host: the address of this machine that sessions and data links listen on and peers use.
    """

    worker_id: WorkerId
    role: Role
    epoch: Epoch
    spec: ClusterSpec
    threads: int = 1
    blocks: int = 0
    pool: int = 0
    host: str = "127.0.0.1"

    @property
    def pool_spec(self) -> PoolSpec:
        return self.spec.pools[self.pool]


@dataclass(frozen=True, slots=True)
class RankBoot:
    """What a rank other than the leader needs.  size: ranks in all; port: of the leader's store.

    blocks, block_bytes: geometry of the worker's KV arena.
    """

    spec: ClusterSpec
    pool: int
    threads: int
    rank: int
    size: int
    port: int
    blocks: int
    block_bytes: int
