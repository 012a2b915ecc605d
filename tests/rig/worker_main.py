"""A worker process driven over its standard input: one JSON command a line, one JSON answer.

Started by `tests.rig.workers`; ends when its parent does (end of input).
"""

import json
import logging
import sys
from dataclasses import asdict

from actors.boot import WorkerBoot
from actors.worker import WorkerProcess
from core.ids import Epoch, WorkerId
from core.messages import Role
from core.spec import ClusterSpec, FaultSpec, from_mapping
from tests.rig.workers import worker_info


def main() -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    wanted = json.loads(sys.stdin.readline())
    boot = WorkerBoot(
        WorkerId(wanted["worker_id"]),
        Role(wanted["role"]),
        Epoch(wanted["epoch"]),
        from_mapping(ClusterSpec, wanted["spec"]),
        threads=wanted["threads"],
        blocks=wanted["blocks"],
        pool=wanted["pool"],
    )
    worker = WorkerProcess(boot)
    answer(asdict(worker.start(lambda phase: None)))
    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "report":
                answer(asdict(worker.report()))
            case "audit":
                answer(worker.audit())
            case "faults":
                worker.set_faults(tuple(FaultSpec(**rule) for rule in command["rules"]))
                answer("")
            case "peers":
                worker.set_peers(tuple(map(worker_info, command["peers"])))
                answer("")
            case "stop":
                worker.stop()
                answer("")
                return


def answer(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
