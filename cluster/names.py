"""Names of a cluster and its actors: how it finds its own again, and what to type.  Pure."""

from core.ids import Epoch, WorkerId

_ROOT = "trireme"
_DEFAULT = "trireme"


def supervisor_name(cluster: str) -> str:
    return f"{_ROOT}/{cluster}/supervisor"


def hint(command: str, cluster: str) -> str:
    """What to type about this cluster."""
    return f"trireme {command}" + ("" if cluster == _DEFAULT else f" --name {cluster}")


def worker_name(cluster: str, worker_id: WorkerId, epoch: Epoch) -> str:
    return f"{_ROOT}/{cluster}/{worker_id}/{epoch}"


def parse_worker(cluster: str, name: str) -> tuple[WorkerId, Epoch] | None:
    """The inverse of `worker_name`; None for anything that is no worker of this cluster."""
    parts = name.split("/")
    if len(parts) != 4 or parts[:2] != [_ROOT, cluster] or not parts[3].isdecimal():
        return None
    return WorkerId(parts[2]), Epoch(int(parts[3]))
