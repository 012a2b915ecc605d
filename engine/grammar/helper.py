"""The process that compiles grammars for a worker: it can be killed, a call in the worker cannot.

Started by `engine.grammar.isolated`; ends by itself as soon as the worker is gone.
"""

import os
import resource
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from core.errors import BadRequest
from engine.grammar.rejection import rejected
from engine.grammar.wire import DONE, FAILED, READY, unpack_grammar, unpack_vocabulary
from engine.grammar.xgr import Toolkit

_MEMORY_BYTES = 2 << 30
_NICENESS = 10


def main(descriptor: int) -> None:
    """Never returns.  descriptor: of a connection to the worker, inherited."""
    os.nice(_NICENESS)
    worker = Connection(descriptor)
    toolkit = Toolkit(unpack_vocabulary(worker.recv_bytes()))
    _limit_memory()
    jobs: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_receive, args=(worker, jobs), name="receive", daemon=True).start()
    worker.send_bytes(READY)
    while True:
        worker.send_bytes(_answer(toolkit, jobs.get()))


def _receive(worker: Connection, jobs: "SimpleQueue[bytes]") -> None:
    """Notices the end of the worker even while a grammar is being compiled."""
    while True:
        try:
            jobs.put(worker.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


def _answer(toolkit: Toolkit, job: bytes) -> bytes:
    grammar = unpack_grammar(job)
    try:
        return DONE + toolkit.compile(grammar).dump()
    except BadRequest as error:
        return FAILED + error.message.encode()
    except MemoryError:
        return FAILED + rejected(grammar, "takes too much memory; simplify it").message.encode()


def _limit_memory() -> None:
    """Beyond what is in use now; an allocation above that fails."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
