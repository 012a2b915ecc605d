"""Tiny-model clusters of real processes: one per test module and shape, stopped at its end."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from core.spec import ClusterSpec, from_mapping
from tests.rig.cluster import Cluster
from tests.rig.tiny import Oracle, tiny_model

ONE_EACH = [{"role": "prefill"}, {"role": "decode"}]
QUICK = {
    "call_s": 0.5,
    "prefill_s": 1.0,
    "transfer_s": 0.5,
    "token_s": 1.0,
    "lease_s": 2.0,
    "queue_s": 20.0,
}
"""Deadlines in which a tiny model does everything many times over, so that faults show soon."""

Start = Callable[..., Cluster]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def oracle(tiny_folder: Path) -> Oracle:
    torch.set_num_threads(1)
    return Oracle(tiny_folder)


@pytest.fixture(scope="module")
def start(tiny_folder: Path) -> Iterator[Start]:
    """start(pools=…, kv=…, …): the cluster of that spec; the same spec gives the same cluster."""
    running: dict[str, Cluster] = {}

    def begin(**sections: Any) -> Cluster:
        raw = {
            "model": {"ref": str(tiny_folder), "dtype": "float32"},
            "pools": ONE_EACH,
            "kv": {"blocks": 256},
            "timeouts": QUICK,
            **sections,
        }
        name = repr(raw)
        if name not in running:
            running[name] = Cluster(from_mapping(ClusterSpec, raw))
        return running[name]

    yield begin
    for cluster in running.values():
        cluster.stop()
