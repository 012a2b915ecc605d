"""Ranks as threads of one process: real process groups and weights, one pool, no start-up."""

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import torch

from engine.device.backend import TorchBackend
from engine.device.pool import KVPool
from engine.device.runner import Runner
from engine.model.config_file import load_config
from engine.model.refs import resolve
from engine.model.weights import load_weights
from engine.parallel.collectives import Collectives, connect, join_store, lead_store
from engine.parallel.gang import GangRunner, follow
from engine.parallel.spread import build_rank

LIMIT_S = 60.0
CPU = torch.device("cpu")


@contextmanager
def groups(size: int) -> Iterator[list[Collectives]]:
    """The process group of every rank; each is gone when it is taken out of the list."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = lead_store(listener.detach())
    with ThreadPoolExecutor(size) as ranks:
        joined = [
            ranks.submit(lambda n=n: connect(n, size, join_store(port) if n else store, CPU))
            for n in range(size)
        ]
        met = [future.result(LIMIT_S) for future in joined]
        joined.clear()
        yield met


@contextmanager
def gang(folder: Path, pool: KVPool, size: int) -> Iterator[GangRunner]:
    """The leader's runner over `pool`; the others follow until the end of the block, and their
    failure fails it."""
    files = resolve(str(folder))
    config = load_config(files)

    def runner(group: Collectives) -> Runner:
        backend = TorchBackend.of(torch.float32)
        weights = load_weights(files, config, torch.float32)
        model = build_rank(config, weights, backend.ops, group)
        return Runner(model, pool.of_rank(group.rank, size), backend)

    with groups(size) as met, ThreadPoolExecutor(size) as ranks:
        inboxes = [SimpleQueue() for _ in met[1:]]

        def send(body: bytes | None) -> None:
            for inbox in inboxes:
                inbox.put(body)

        followers: list[Future[None]] = [
            ranks.submit(lambda g=g, i=i: follow(runner(g), lambda: i.get(timeout=LIMIT_S)))
            for g, i in zip(met[1:], inboxes, strict=True)
        ]
        try:
            yield GangRunner(runner(met[0]), send)
        finally:
            send(None)
            for follower in followers:
                follower.result(LIMIT_S)
