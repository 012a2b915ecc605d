"""Which workers a spec asks for, and whether a machine can hold them.  Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core.ids import WorkerId
from core.messages import Role
from core.spec import ClusterSpec


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """A place for one worker, whichever incarnation fills it.

    threads: torch threads of each rank; blocks: KV blocks, 0 for as many as spec.kv.memory_mb
    holds; ranks: processes that the worker is made of; pool: its place in spec.pools; gpus: of its
    own.
    """

    worker_id: WorkerId
    role: Role
    threads: int
    blocks: int
    ranks: int = 1
    pool: int = 0
    gpus: int = 0

    @property
    def needs(self) -> Mapping[str, float]:
        """Ray resources that one worker of this slot occupies, on one node: its ranks share
        memory."""
        cpus = {"CPU": float(self.threads * self.ranks)}
        return cpus | {"GPU": float(self.gpus)} if self.gpus else cpus


def layout(spec: ClusterSpec, cores: int) -> tuple[WorkerSlot, ...]:
    """The workers of `spec` on a machine of `cores` cores, in the order of its pools.

    All ranks get the same number of threads: how a sum is split over threads decides its
    rounding, and two workers must compute the same tokens.
    """
    even = max(1, cores // sum(pool.replicas * pool.tensor_parallel for pool in spec.pools))
    gpus = int(spec.model.device == "cuda")
    slots: list[WorkerSlot] = []
    taken: Counter[Role] = Counter()
    for place, pool in enumerate(spec.pools):
        ranks = pool.tensor_parallel
        threads = max(1, spec.batch.threads // ranks) if spec.batch.threads else even
        for _ in range(pool.replicas):
            worker_id = WorkerId(f"{pool.role}-{taken[pool.role]}")
            taken[pool.role] += 1
            slots.append(
                WorkerSlot(worker_id, pool.role, threads, spec.kv.blocks, ranks, place, gpus)
            )
    return tuple(slots)


def shortfall(needs: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> str:
    """What even the best node lacks in total to hold `needs`; "" when some node suffices.

    nodes: total resources of each node, whatever is in use now.
    """
    if not nodes:
        return "there is no node at all"
    lacks = [
        {name: amount for name, amount in needs.items() if node.get(name, 0.0) < amount}
        for node in nodes
    ]
    best = min(range(len(nodes)), key=lambda i: len(lacks[i]))
    return ", ".join(
        f"needs {name} {amount:g}, the largest node has "
        f"{max(node.get(name, 0.0) for node in nodes):g}"
        for name, amount in sorted(lacks[best].items())
    )
