"""`trireme status`, `trireme down` and `serve --dry-run`: what needs neither Ray nor torch."""

import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster import probe, statefile
from cluster.layout import layout
from cluster.names import hint
from core.errors import DeadlineExceeded, Stage, Unavailable
from core.spec import ClusterSpec

DOWN_S = 60.0
STATUS_S = 5.0
NOT_READY = 1
NOTHING_RUNS = 3
"""Exit status, as `systemctl status` has it."""

COLUMNS = (
    "worker", "role", "state", "free blocks", "of them cached", "waiting", "running", "ms a step",
    "tokens made",
)  # fmt: skip


def show_layout(spec: ClusterSpec, cores: int, console: Console) -> int:
    """Print what `serve` would start."""
    slots = layout(spec, cores)
    table = Table(title=f"{spec.name}: {spec.model.ref} on {spec.http.host}:{spec.http.port}")
    for name in ("worker", "role", "threads", "KV blocks", "KV memory"):
        table.add_column(name)
    for slot in slots:
        blocks = str(slot.blocks) if slot.blocks else "as many as fit"
        memory = "by blocks" if slot.blocks else f"{spec.kv.memory_mb} MiB"
        threads = f"{slot.ranks} x {slot.threads}" if slot.ranks > 1 else str(slot.threads)
        table.add_row(slot.worker_id, slot.role, threads, blocks, memory)
    console.print(table)
    all_threads = sum(slot.threads * slot.ranks for slot in slots)
    console.print(f"{len(slots)} workers, {all_threads} threads on {cores} cores")
    if not spec.kv.blocks:
        console.print(f"KV memory in all: {len(slots) * spec.kv.memory_mb} MiB, plus the weights")
    return 0


def show_status(folder: Path, name: str, as_json: bool, console: Console) -> int:
    running = statefile.find(folder, name)
    if running is None:
        console.print(nothing(folder, name))
        return NOTHING_RUNS
    try:
        status = probe.get_json(f"{running.url}/status", STATUS_S)
    except Unavailable as error:
        console.print(f"{name}, pid {running.pid}, is starting or stopping: {error.message}")
        return NOT_READY
    if as_json:
        console.print(json.dumps(status, indent=2), markup=False, highlight=False, soft_wrap=True)
    else:
        console.print(f"{name} on {running.url}, pid {running.pid}")
        _print_status(status, console)
    return 0


def down(folder: Path, name: str, console: Console) -> int:
    """Ask the serving process to stop and wait until it has.  Raises DeadlineExceeded."""
    running = statefile.find(folder, name)
    if running is None:
        console.print(nothing(folder, name))
        return NOTHING_RUNS
    os.kill(running.pid, signal.SIGTERM)
    if not statefile.await_end(folder, name, DOWN_S):
        raise DeadlineExceeded(
            f"process {running.pid} has not stopped within {DOWN_S:g} s; "
            f"`{hint('down', name)}` again, or `kill -9 {running.pid}`",
            stage=Stage.START,
        )
    console.print(f"{name} is down")
    return 0


def nothing(folder: Path, name: str) -> str:
    """What to say when no cluster of that name runs."""
    others = statefile.names(folder)
    also = f"; running: {', '.join(others)} (see --name)" if others else ""
    return f"no cluster {name!r} runs for this user; `trireme serve` starts one{also}"


def _print_status(status: Mapping[str, Any], console: Console) -> None:
    """The workers as a table, the rest but the settings as dotted lines; zeros are left out."""
    table = Table(*COLUMNS)
    for worker in status["workers"]:
        table.add_row(worker["worker_id"], worker["role"], *_load(worker))
    console.print(table)
    wanted = sum(pool["replicas"] for pool in status["settings"]["pools"])
    if len(status["workers"]) < wanted:
        console.print(f"{len(status['workers'])} of {wanted} workers; the others are starting")
    for worker in status["workers"]:
        if worker["lossy"]:
            line = f"{worker['worker_id']} is lossy: {worker['lossy']}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    rest = {key: value for key, value in status.items() if key not in ("workers", "settings")}
    for path, value in _leaves(rest, ""):
        if value:
            console.print(f"{path}: {value}", markup=False, highlight=False, soft_wrap=True)


def _load(worker: Mapping[str, Any]) -> tuple[str, ...]:
    """A worker without a report is not idle: its load is unknown."""
    report = worker["report"]
    if report is None:
        return ("connected" if worker["connected"] else "unreachable",)
    return (
        "draining" if report["draining"] else "serving",
        f"{report['free_blocks']} of {report['total_blocks']}",
        str(report["cached_blocks"]),
        str(report["waiting"]),
        str(report["running"]),
        f"{report['step_ms']:.1f}",
        str(report["generated_tokens_total"]),
    )


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
