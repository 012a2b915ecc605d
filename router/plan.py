"""Where a request may run: an ordered list of (prefill, decode) placements.  Pure and total.

Cost of a placement is the load of its busier worker after placing: in-flight *tokens*, not
requests, for one long prompt outweighs many short ones.  A worker that takes both legs gets both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from core.ids import Epoch, WorkerId
from core.messages import Role


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker with a live session, as its last report described it.

    kv_variant: KV moves between workers of the same only.
    """

    worker_id: WorkerId
    role: Role
    epoch: Epoch
    draining: bool = False
    kv_variant: str = ""


@dataclass(frozen=True, slots=True)
class Placement:
    """Who prefills and who decodes; the same worker twice means local, without a transfer.

    degraded: what makes this second choice, "" when nothing does.
    """

    prefill: WorkerId
    decode: WorkerId
    degraded: str = ""

    @property
    def local(self) -> bool:
        return self.prefill == self.decode


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be placed.  tokens to prefill; fewer than disagg_min_tokens stay local.

    turn: any number; successive ones spread requests over equally loaded workers.
    """

    tokens: int
    disagg_min_tokens: int = 0
    turn: int = 0


def rank(
    workers: Iterable[WorkerView], loads: Mapping[WorkerId, int], demand: Demand
) -> list[Placement]:
    """Placements, best first; [] when no worker takes new work.

    loads: in-flight tokens per worker, absent means 0.  A worker does the other role's part
    only where nobody has that role: a full pool is waited for, a missing one is replaced.
    """
    ready = _rotated([w for w in workers if not w.draining], demand.turn)
    ready.sort(key=lambda w: w.role is Role.HYBRID)  # among equals, those with one job
    prefillers = [w for w in ready if w.role.prefills]
    decoders = [w for w in ready if w.role.decodes]
    if not decoders:
        found = _alone(prefillers, "local_decode")
    elif not prefillers:
        found = _alone(decoders, "local_prefill")
    elif demand.tokens < demand.disagg_min_tokens:
        found = _alone(decoders)
    else:
        found = _pairs(prefillers, decoders) or _alone(decoders, "incompatible_kv")
    return sorted(found, key=lambda p: _cost(p, loads, demand.tokens))


def _rotated(workers: list[WorkerView], turn: int) -> list[WorkerView]:
    ordered = sorted(workers, key=lambda w: w.worker_id)
    cut = turn % max(len(ordered), 1)
    return ordered[cut:] + ordered[:cut]


def _alone(workers: Sequence[WorkerView], degraded: str = "") -> list[Placement]:
    return [Placement(w.worker_id, w.worker_id, degraded) for w in workers]


def _pairs(prefillers: Sequence[WorkerView], decoders: Sequence[WorkerView]) -> list[Placement]:
    """Two hybrids are never paired: either does it alone without moving anything."""
    return [
        Placement(p.worker_id, d.worker_id)
        for p, d in product(prefillers, decoders)
        if p.worker_id == d.worker_id
        or (p.kv_variant == d.kv_variant and {p.role, d.role} != {Role.HYBRID})
    ]


def _cost(placement: Placement, loads: Mapping[WorkerId, int], tokens: int) -> tuple[int, int]:
    """(load of the busier worker, load of both) after placing `tokens` on each leg."""
    legs = (placement.prefill, placement.decode)
    after = {worker: loads.get(worker, 0) + tokens * legs.count(worker) for worker in legs}
    return max(after.values()), sum(after.values())
