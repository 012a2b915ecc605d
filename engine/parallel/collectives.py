"""The sums and gathers of a tensor-parallel gang: one process group of torch.distributed.

gloo on CPU, NCCL on GPU.  The one place where their errors become `core.errors`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from core.errors import Stage, WorkerLost

LOOPBACK = "127.0.0.1"
dist: Any = distributed
"""The type stubs know neither stores nor options of backends."""
_DEADLINE = timedelta(seconds=30)


class Collectives:
    """One rank's place in its gang.  Every rank must make the same calls in the same order; a
    call that fails leaves the group unusable for good."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        """group: a backend of torch.distributed, which has no common type with these calls."""
        self._group = group
        self.rank = rank
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x, contiguous, over all ranks, in place.  Every rank gets the same bits.

        Raises WorkerLost.
        """
        with self._translated("all_reduce"):
            self._group.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """x, contiguous and of one shape, of all ranks in order; empty on all but rank 0.

        Raises WorkerLost.
        """
        every = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        with self._translated("gather"):
            self._group.gather([every] if every else [], [x], options).wait()
        return every

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise WorkerLost(
                f"rank {self.rank} of {self.size} lost the others in {what}: {error}; "
                "the whole worker must start afresh",
                stage=Stage.DECODE,
            ) from error


def connect(rank: int, size: int, store: Any, device: torch.device) -> Collectives:
    """Meet the others; returns when all are there.  Raises WorkerLost after 30 s."""
    try:
        make = _nccl if device.type == "cuda" else _gloo
        return Collectives(make(rank, size, store), rank, size)
    except RuntimeError as error:
        raise WorkerLost(
            f"rank {rank} of {size} did not meet the others within "
            f"{_DEADLINE.total_seconds():g} s: {error}; look for their errors in this log",
            stage=Stage.START,
        ) from error


def lead_store(listener: int) -> Any:
    """Where ranks find each other, on the leader.  listener: a listening socket's descriptor on
    loopback, which the store takes over; by itself it would listen on every interface."""
    return dist.TCPStore(
        LOOPBACK,
        0,
        is_master=True,
        master_listen_fd=listener,
        wait_for_workers=False,
        timeout=_DEADLINE,
    )


def join_store(port: int) -> Any:
    """The leader's store, on the other ranks.  Raises RuntimeError after 30 s."""
    return dist.TCPStore(LOOPBACK, port, wait_for_workers=False, timeout=_DEADLINE)


def _gloo(rank: int, size: int, store: Any) -> Any:
    """Over loopback: by itself gloo takes the interface that the host's name resolves to."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = _DEADLINE
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(rank: int, size: int, store: Any) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _DEADLINE
    return dist.ProcessGroupNCCL(store, rank, size, options)
