"""What the supervisor tells about its workers: plain values for the CLI and for tests."""

from dataclasses import dataclass

from core.ids import Epoch, WorkerId
from core.messages import Fault, Role
from core.states import WorkerState


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One slot.  epoch and pid are those of its incarnation, None while it has none.

    failures: early deaths in a row; fault: why the last incarnation ended.  rank_pids: all
    processes of the worker, `pid` first, once it is ready.  lossy: see WorkerInfo.
    """

    worker_id: WorkerId
    role: Role
    state: WorkerState
    phase: str
    epoch: Epoch | None = None
    pid: int | None = None
    address: str = ""
    failures: int = 0
    fault: Fault | None = None
    rank_pids: tuple[int, ...] = ()
    lossy: str = ""


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """pid: the supervisor's own."""

    name: str
    pid: int
    version: int
    workers: tuple[WorkerStatus, ...]

    @property
    def ready(self) -> bool:
        return all(worker.state is WorkerState.READY for worker in self.workers)
