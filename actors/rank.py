"""The process of a rank that is not the leader: load one share of the model, follow the leader.

Started by `actors.gang`; ends by itself as soon as the leader is gone, whatever it is doing.
"""

import json
import logging
import os
import socket
import sys
import threading
import time

from actors.boot import RankBoot
from actors.control import BEAT, MAPPED, Control
from core.spec import from_mapping
from transport.arena import Geometry, map_rank

log = logging.getLogger(__name__)

BEAT_S = 0.25


def main(control_fd: int, arena_fd: int) -> None:
    """Never returns.  control_fd, arena_fd: open descriptors, inherited."""
    control = Control(socket.socket(fileno=control_fd))
    body = control.receive()
    if body is None:
        sys.exit("the leader was gone before it said what to do")
    boot = from_mapping(RankBoot, json.loads(body))
    logging.basicConfig(format=f"rank {boot.rank}: %(levelname)s %(message)s")
    threading.Thread(target=_beat, args=(control,), name="beat", daemon=True).start()
    arena = map_rank(arena_fd, Geometry(boot.blocks, boot.block_bytes))
    os.close(arena_fd)
    control.mark(MAPPED)
    # Only now, for it takes seconds: the leader cannot seal the arena before all have mapped it.
    from actors.loaded import follow_leader

    follow_leader(boot, arena, control)
    os._exit(0)


def _beat(control: Control) -> None:
    """Says that this process runs, and finds out that the leader does not."""
    while True:
        try:
            control.mark(BEAT)
        except OSError:
            os._exit(0)
        time.sleep(BEAT_S)
