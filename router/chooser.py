"""Applies `router.plan` to the fleet of this moment: who takes new work, and where one request
may try next."""

from collections.abc import Iterator
from itertools import count

from core.ids import Epoch, WorkerId
from core.messages import WorkerReport
from core.ports import Fleet
from router.attempt import Seats
from router.generation import Life
from router.ledger import Ledger
from router.plan import Demand, Placement, WorkerView, rank


class Chooser:
    """Keeps the last report of every worker.  first_turn: where rotating over ties begins."""

    def __init__(
        self, fleet: Fleet, ledger: Ledger, disagg_min_tokens: int, first_turn: int
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._disagg_min_tokens = disagg_min_tokens
        self._turns = count(first_turn)
        self._reports: dict[WorkerId, WorkerReport] = {}

    def learn(self, report: WorkerReport) -> bool:
        """Whether placements change with it: a new worker, another role, a drain."""
        before = self._reports.get(report.worker_id)
        self._reports[report.worker_id] = report
        return before is None or _terms(before) != _terms(report)

    def forget(self, worker_id: WorkerId, epoch: Epoch) -> None:
        report = self._reports.get(worker_id)
        if report is not None and report.epoch == epoch:
            del self._reports[worker_id]

    def ready(self) -> int:
        """Workers that take new work."""
        return sum(not view.draining for view in self._views())

    def choose(self, life: Life) -> tuple[Placement, Seats] | None:
        """The best placement without workers that refused the request, and, if that leaves any,
        without those that failed it."""
        for placement in self._ranked(life):
            if not life.refused.keys() & {placement.prefill, placement.decode}:
                prefill = self._fleet.port(placement.prefill)
                decode = self._fleet.port(placement.decode)
                if prefill is not None and decode is not None:
                    return placement, Seats(prefill, decode)
        return None

    def _ranked(self, life: Life) -> Iterator[Placement]:
        views = list(self._views())
        target = life.recompute_on
        if target is not None and any(v.worker_id == target and not v.draining for v in views):
            yield Placement(target, target, "local_prefill")
        loads = {v.worker_id: self._ledger.load(v.worker_id, v.epoch) for v in views}
        demand = Demand(len(life.tokens), self._disagg_min_tokens, next(self._turns))
        yield from rank([v for v in views if v.worker_id not in life.avoid], loads, demand)
        yield from rank(views, loads, demand)

    def _views(self) -> Iterator[WorkerView]:
        """Roles and draining change at run time: the last report knows better than membership."""
        for port in self._fleet.ports():
            info = port.info
            report = self._reports.get(info.worker_id)
            if report is None or report.epoch != info.epoch:
                yield WorkerView(info.worker_id, info.role, info.epoch, False, info.kv_variant)
            else:
                yield WorkerView(
                    info.worker_id, report.role, info.epoch, report.draining, info.kv_variant
                )


def _terms(report: WorkerReport) -> tuple[object, ...]:
    return report.epoch, report.role, report.draining
