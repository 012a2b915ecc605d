"""Names of the actors of a cluster: how it finds its own again.  Pure."""

from core.ids import Epoch, WorkerId

_ROOT = "trireme"


def supervisor_name(cluster: str) -> str:
    return f"{_ROOT}/{cluster}/supervisor"


def worker_name(cluster: str, worker_id: WorkerId, epoch: Epoch) -> str:
    return f"{_ROOT}/{cluster}/{worker_id}/{epoch}"


def parse_worker(cluster: str, name: str) -> tuple[WorkerId, Epoch] | None:
    """The inverse of `worker_name`; None for anything that is no worker of this cluster."""
    parts = name.split("/")
    if len(parts) != 4 or parts[:2] != [_ROOT, cluster] or not parts[3].isdecimal():
        return None
    return WorkerId(parts[2]), Epoch(int(parts[3]))
