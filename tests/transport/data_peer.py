"""One half of the data plane as a process of its own: `python -m tests.transport.data_peer`.

argv: "source" or "destination", then a JSON object.  Prints one JSON line per event.
"""

import json
import os
import signal
import sys

from core.ids import LeaseId
from core.messages import DataEndpoint
from core.spec import FaultSpec, TimeoutSpec, TransportSpec
from tests.transport.data_rig import LARGE, StrictLanding, filled, ticket
from transport.arena import MemfdArena
from transport.data_server import DataServer
from transport.faulty import FaultInjector
from transport.link import Source, open_link

BLOCKS = 64


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


def source(job: dict[str, object]) -> None:
    """Push blocks 0 … 63 to places 0 … 63 of each lease in turn."""
    arena = filled(MemfdArena.create(BLOCKS, LARGE.block_bytes), seed=1)
    rules = (FaultSpec(on="data", action=job["action"], skip=job["skip"]),) if job["action"] else ()
    from_here = Source(arena, LARGE, TransportSpec(), TimeoutSpec(), FaultInjector(rules))
    endpoint = DataEndpoint(job["mover"], job["address"])
    link = open_link(endpoint, bytes.fromhex(job["key"]), from_here, "decode-0")
    for lease in job["leases"]:
        report = link.push(ticket(arena, LeaseId(lease), tuple(range(BLOCKS))), 20)
        say(state=report.state, bytes=report.bytes, reason=report.reason)
    link.close()
    arena.close()


def destination(job: dict[str, object]) -> None:
    """Land leases named "0", "1", …; die at begin number `die_at`; stay until stdin ends."""
    arena = MemfdArena.create(BLOCKS, LARGE.block_bytes)
    landing = StrictLanding()
    for name in range(8):
        landing.leases[LeaseId(str(name))] = landing.leases[landing.reserve(tuple(range(BLOCKS)))]

    def on_begin() -> None:
        if landing.begins == job["die_at"]:
            os.kill(os.getpid(), signal.SIGKILL)

    landing.on_begin = on_begin
    server = DataServer(landing, arena, LARGE, TransportSpec(), TimeoutSpec(), "127.0.0.1")
    server.admit("prefill-0", bytes.fromhex(job["key"]))
    say(endpoints={e.mover: e.address for e in server.endpoints})
    sys.stdin.read()
    say(fenced=server.close(), settled=landing.settled(), content=bytes(arena.blocks[:64]).hex())


if __name__ == "__main__":
    {"source": source, "destination": destination}[sys.argv[1]](json.loads(sys.argv[2]))
