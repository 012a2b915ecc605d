"""A worker program without a model, run by the real worker actor in the launch tests.

spec.model.ref says how it behaves: "ok", "unsupported" (start raises), "crash" (start exits).
"""

import os
from collections.abc import Callable

from actors.boot import WorkerBoot
from core.errors import ModelUnsupported, Stage
from core.messages import Counter, WorkerInfo, WorkerReport
from core.spec import FaultSpec


class FakeWorker:
    def __init__(self, boot: WorkerBoot) -> None:
        self._boot = boot
        self._peers: tuple[WorkerInfo, ...] = ()
        self._faults = 0
        self._draining = False

    def start(self, progress: Callable[[str], None]) -> WorkerInfo:
        progress("loading nothing")
        if self._boot.spec.model.ref == "unsupported":
            raise ModelUnsupported(
                "no such architecture", stage=Stage.START, worker=self._boot.worker_id
            )
        if self._boot.spec.model.ref == "crash":
            os._exit(3)
        boot = self._boot
        return WorkerInfo(boot.worker_id, boot.role, boot.epoch, f"127.0.0.1:{os.getpid()}")

    def report(self) -> WorkerReport:
        counters = (
            Counter("peers", len(self._peers)),
            Counter("newest_peer", max((p.epoch for p in self._peers), default=0)),
            Counter("faults", self._faults),
        )
        boot = self._boot
        return WorkerReport(
            boot.worker_id, boot.role, boot.epoch, self._draining, counters=counters
        )

    def set_peers(self, peers: tuple[WorkerInfo, ...]) -> None:
        self._peers = peers

    def set_faults(self, rules: tuple[FaultSpec, ...]) -> None:
        self._faults = len(rules)

    def audit(self) -> str:
        return ""

    def drain(self) -> None:
        self._draining = True

    def stop(self) -> None:
        pass
