"""Handles on worker processes: start in parallel, ask, SIGKILL, SIGSTOP, restart as a new epoch."""

import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from core.messages import Role, WorkerInfo
from core.spec import ClusterSpec, to_mapping

ROOT = Path(__file__).parents[2]
START_S = 90.0
ANSWER_S = 30.0
_EPOCHS = count(1)


def worker_info(told: dict[str, Any]) -> WorkerInfo:
    """As it comes out of JSON."""
    given = {"role": Role(told["role"]), "rank_pids": tuple(told["rank_pids"])}
    return WorkerInfo(**told | given)


@dataclass
class Worker:
    """One incarnation.  `ready` waits for its start; every answer has a deadline."""

    worker_id: str
    role: Role
    spec: ClusterSpec
    blocks: int = 0
    threads: int = 1
    pool: int = 0
    process: subprocess.Popen[bytes] = field(init=False)
    info: WorkerInfo = field(init=False)
    _unread: bytes = b""

    def __post_init__(self) -> None:
        self.epoch = next(_EPOCHS)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rig.worker_main"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._tell(
            {
                "worker_id": self.worker_id,
                "role": str(self.role),
                "epoch": self.epoch,
                "spec": to_mapping(self.spec),
                "threads": self.threads,
                "blocks": self.blocks,
                "pool": self.pool,
            }
        )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ready(self) -> WorkerInfo:
        told = self._hear(START_S)
        self.info = worker_info(told)
        return self.info

    def report(self) -> dict[str, Any]:
        return self._ask({"do": "report"})

    def audit(self) -> str:
        return self._ask({"do": "audit"})

    def set_faults(self, rules: list[dict[str, Any]]) -> None:
        self._ask({"do": "faults", "rules": rules})

    def set_peers(self, peers: list[WorkerInfo]) -> None:
        self._ask({"do": "peers", "peers": [asdict(p) for p in peers]})

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL, and reap."""
        self.process.kill()
        self.process.wait(10)

    def restarted(self) -> "Worker":
        """A new incarnation of a dead worker; the caller awaits `ready`."""
        return Worker(self.worker_id, self.role, self.spec, self.blocks, self.threads, self.pool)

    def stop(self) -> None:
        """Orderly if it still answers, else by force."""
        try:
            if self.alive:
                self._ask({"do": "stop"})
                self.process.wait(15)
        except (OSError, TimeoutError, EOFError, subprocess.TimeoutExpired):
            pass
        finally:
            if self.alive:
                self.kill()
            for pipe in (self.process.stdin, self.process.stdout):
                pipe.close()

    def _ask(self, command: dict[str, Any]) -> Any:
        self._tell(command)
        return self._hear(ANSWER_S)

    def _tell(self, command: dict[str, Any]) -> None:
        self.process.stdin.write(json.dumps(command).encode() + b"\n")

    def _hear(self, limit_s: float) -> Any:
        out = self.process.stdout
        while b"\n" not in self._unread:
            if not select.select([out], [], [], limit_s)[0]:
                raise TimeoutError(f"{self.worker_id} said nothing for {limit_s} s")
            data = os.read(out.fileno(), 1 << 16)
            if not data:
                raise EOFError(f"{self.worker_id} ended, exit code {self.process.poll()}")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)
