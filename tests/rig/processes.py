"""Looking at processes of this machine through /proc, for the launch tests."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

LISTEN = "0A"


def children(pid: int) -> set[int]:
    """All living descendants of `pid`."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue  # it ended while we looked
        state, parent = text.rpartition(")")[2].split()[:2]
        if state != "Z":
            parents[int(stat.parent.name)] = int(parent)
    found, last = {pid}, set[int]()
    while found != last:
        last = set(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found - {pid}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def listeners(pids: set[int]) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket on which one of these processes listens."""
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    found: set[tuple[str, int]] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.add((_address(address), int(port, 16)))
    return found


def until(check: Callable[[], object], timeout_s: float) -> object:
    """The first true answer of `check`; fails the test when none came in time."""
    end = time.monotonic() + timeout_s
    while True:
        found = check()
        if found:
            return found
        assert time.monotonic() < end, f"not within {timeout_s} s"
        time.sleep(0.05)


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    try:
        for fd in os.scandir(f"/proc/{pid}/fd"):
            target = os.readlink(fd.path)
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        return found  # it ended, or closed the file, while we looked
    return found


def _address(text: str) -> str:
    """/proc writes addresses as hexadecimal words of the host's byte order."""
    raw = b"".join(bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8))
    shown = socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
    return shown.removeprefix("::ffff:")
