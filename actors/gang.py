"""The other ranks of a tensor-parallel worker, as its leader holds them: processes of its own.

They are children of the leader, on its machine, because all ranks share one KV arena.  A gang
lives and dies as one: when a rank is lost the leader ends its process, which is the death of the
worker; when the leader is gone, so is every rank, within a beat.
"""

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import torch

from actors.boot import RankBoot, WorkerBoot
from actors.control import LOADED, MAPPED, Control
from core.errors import Stage, WorkerLost
from core.spec import to_mapping
from engine.parallel.collectives import LOOPBACK, Collectives, connect, lead_store

log = logging.getLogger(__name__)

MAPPED_S = 20.0
LOADED_S = 60.0
SEND_S = 30.0
TICK_S = 0.25
SILENT_TICKS = 8
EXIT_RANK_LOST = 71
_FATE_S = 0.5
_START = "import sys; sys.path[:] = {path}; from actors.rank import main; main({control}, {arena})"
"""Imports what this process would import, whatever its working folder has."""


class Rank:
    """One of them."""

    def __init__(self, number: int, process: subprocess.Popen[bytes], control: Control) -> None:
        self.number = number
        self.process = process
        self.control = control
        self.marked: set[int] = set()
        self.silent_ticks = 0

    def __str__(self) -> str:
        return f"rank {self.number} (pid {self.process.pid})"

    def fileno(self) -> int:
        return self.control.sock.fileno()

    def hear(self) -> bool:
        """Take what it said; False when it is gone.  For a readable socket."""
        marks = self.control.marks()
        self.marked.update(marks)
        self.silent_ticks = 0
        return bool(marks)

    def fate(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            status = self.process.wait(_FATE_S)
            how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
            return f"ended ({how})"
        return "closed its connection"


class Gang:
    """Made by the leader while it loads; `send` is for its engine thread."""

    def __init__(self, boot: WorkerBoot, blocks: int, block_bytes: int) -> None:
        """Starts nothing yet."""
        self._worker_id = boot.worker_id
        self._size = boot.pool_spec.tensor_parallel
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        self._store = lead_store(listener.detach())
        self._boots = [
            RankBoot(boot.spec, boot.pool, boot.threads, n, self._size, port, blocks, block_bytes)
            for n in range(1, self._size)
        ]
        self._ranks: list[Rank] = []
        self._stopping = threading.Event()

    @property
    def pids(self) -> tuple[int, ...]:
        """Of all ranks, the leader's own first."""
        return os.getpid(), *(rank.process.pid for rank in self._ranks)

    def spawn(self, arena_fd: int) -> None:
        """Start them; returns when all have mapped the arena.  Raises WorkerLost."""
        self._ranks = [_start(boot, arena_fd) for boot in self._boots]
        self._await(MAPPED, MAPPED_S)

    def meet(self, device: torch.device) -> Collectives:
        """Their process group, once all have loaded the model.  Raises WorkerLost."""
        self._await(LOADED, LOADED_S)
        return connect(0, self._size, self._store, device)

    def send(self, body: bytes) -> None:
        """To all.  Raises WorkerLost."""
        for rank in self._ranks:
            try:
                rank.control.send(body)
            except OSError as error:
                raise self._lost(rank, f"takes no plans: {error}", Stage.DECODE) from error

    def watch(self) -> None:
        """From now on the loss of a rank, or its silence for 2 s, ends this process."""
        threading.Thread(target=self._watch, name="gang", daemon=True).start()

    def stop(self, timeout_s: float) -> None:
        """End them all, by force those that outlast `timeout_s`.  Call after the last `send`."""
        self._stopping.set()
        for rank in self._ranks:
            with suppress(OSError):
                rank.control.sock.shutdown(socket.SHUT_WR)
        end = time.monotonic() + timeout_s
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("%s does not end in order and is killed", rank)
                rank.process.kill()
                rank.process.wait(timeout_s)

    def _await(self, mark: bytes, timeout_s: float) -> None:
        """Until every rank has marked it."""
        end = time.monotonic() + timeout_s
        while missing := [rank for rank in self._ranks if mark[0] not in rank.marked]:
            left = end - time.monotonic()
            if left <= 0:
                raise self._lost(missing[0], f"did not come within {timeout_s:g} s", Stage.START)
            for rank in select.select(missing, [], [], left)[0]:
                if not rank.hear():
                    raise self._lost(rank, rank.fate(), Stage.START)

    def _watch(self) -> None:
        """Counts its own ticks instead of reading a clock: if all processes were held up, that
        is no silence."""
        tick = time.monotonic() + TICK_S
        while not self._stopping.is_set():
            wait = max(0.0, tick - time.monotonic())
            gone = [r for r in select.select(self._ranks, [], [], wait)[0] if not r.hear()]
            if time.monotonic() >= tick:
                tick = time.monotonic() + TICK_S
                for rank in self._ranks:
                    rank.silent_ticks += 1
            silent = [rank for rank in self._ranks if rank.silent_ticks > SILENT_TICKS]
            if (gone or silent) and not self._stopping.is_set():
                self._end(gone, silent)

    def _end(self, gone: Sequence[Rank], silent: Sequence[Rank]) -> None:
        for rank in gone:
            log.critical("%s", self._lost(rank, rank.fate(), Stage.DECODE))
        for rank in silent:
            why = f"has been silent for {SILENT_TICKS * TICK_S:g} s"
            log.critical("%s", self._lost(rank, why, Stage.DECODE))
        for rank in self._ranks:
            rank.process.kill()  # one that hangs would not notice that the leader is gone
        os._exit(EXIT_RANK_LOST)

    def _lost(self, rank: Rank, what: str, stage: Stage) -> WorkerLost:
        return WorkerLost(
            f"{rank} of {self._size} {what}; the worker ends with all its ranks, and the "
            "supervisor starts another; see the lines of that rank in this log",
            stage=stage,
            worker=self._worker_id,
        )


def _start(boot: RankBoot, arena_fd: int) -> Rank:
    """In a session of its own, so that Ctrl-C in a terminal reaches the leader alone."""
    ours, theirs = socket.socketpair()
    ours.settimeout(SEND_S)
    code = _START.format(path=sys.path, control=theirs.fileno(), arena=arena_fd)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), arena_fd),
            start_new_session=True,
        )
    control = Control(ours)
    control.send(json.dumps(to_mapping(boot)).encode())
    return Rank(boot.rank, process, control)
