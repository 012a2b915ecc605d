"""`trireme serve`: brings a cluster up in the foreground, watches it, takes it down."""

import contextlib
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape

from cluster import launcher, probe, statefile
from cluster.console import Steps
from cluster.interrupts import Interrupts
from cluster.layout import WorkerSlot, layout
from cluster.machine import usable_cores
from cluster.names import hint
from cluster.status import ClusterStatus, WorkerStatus
from core.errors import DeadlineExceeded, Stage, TriremeError, WorkerLost
from core.ids import Epoch, WorkerId
from core.spec import ClusterSpec
from core.states import WorkerState

WORKER_PROGRAM = "actors.worker:WorkerProcess"
POLL_S = 0.25
WATCH_S = 1.0
STATUS_S = 15.0
SILENCE_S = 60.0
DRAIN_S = 10.0
START_FAILURES = 3
"""Quick deaths of one worker after which starting is given up."""


def serve(spec: ClusterSpec, folder: Path, console: Console) -> int:
    """Serve until interrupted; the exit status.  Raises TriremeError when it cannot start."""
    began = time.monotonic()
    cores = usable_cores()
    slots = layout(spec, cores)
    launcher.check_address(spec.http.host, spec.http.port)
    url = probe.base_url(spec.http.host, spec.http.port)
    with (
        statefile.claim(folder, statefile.Running(spec.name, os.getpid(), url)),
        open(os.devnull, "w") as sink,
        # Ray prints raylet messages whatever it is told; `_watch` tells what matters in them.
        contextlib.redirect_stdout(sink),
    ):
        with Steps(console) as steps:
            spec = resolve_model(spec, steps)
        # A folder of the user's that happens to be called `core` must not be imported.
        os.chdir(folder)
        supervisor: Any = None
        try:
            with Steps(console) as steps:
                steps.show("ray", "private, on loopback")
                steps.done("ray", f"logs in {launcher.start_ray(slots, cores)}")
                Interrupts.install()
                with steps.step("supervisor", ""):
                    supervisor = launcher.start_supervisor(spec, slots, WORKER_PROGRAM)
                _await_workers_and_edge(spec, supervisor, steps)
                with steps.step("first token", "through the whole path"):
                    model = probe.first_token(url, spec.timeouts.start_s)
            took = time.monotonic() - began
            console.print(f"\nready in {took:.1f} s: {escape(model)} on {url}", soft_wrap=True)
            _suggest(console, spec.name, slots, model, url)
            _watch(supervisor, console)
        except (KeyboardInterrupt, SystemExit):  # SystemExit: SIGTERM while Ray starts
            left = f"running streams have {DRAIN_S:g} s to finish" if supervisor else "Ray first"
            console.print(f"stopping: {left}; Ctrl-C again stops at once")
        finally:
            _take_down(supervisor, console)
    return 0


def resolve_model(spec: ClusterSpec, steps: Steps) -> ClusterSpec:
    """Find the model once, here: a download shows, a mistake costs nothing, and every process
    gets the same files.  Raises ConfigError, ModelUnsupported."""
    from engine.model.config_file import load_config
    from engine.model.formats import choose
    from engine.model.refs import resolve
    from engine.parallel.split import check_size

    steps.show("model", spec.model.ref)
    files = resolve(spec.model.ref, lambda line: steps.show("model", line))
    config = load_config(files)
    for place, pool in enumerate(spec.pools):
        check_size(config, pool.tensor_parallel, f"pools[{place}].tensor_parallel")
        choose(spec, place, spec.model.dtype, files)
    steps.done("model", f"found {files.path}")
    name = spec.model.served_name or files.name
    return replace(spec, model=replace(spec.model, ref=str(files.path), served_name=name))


def _await_workers_and_edge(spec: ClusterSpec, supervisor: Any, steps: Steps) -> None:
    """The workers load while Serve starts; the slower of the two decides."""
    end = time.monotonic() + spec.timeouts.start_s
    for worker in _status(supervisor).workers:
        steps.show(worker.worker_id, worker.phase)
    steps.show("serve", "HTTP proxy and edge")
    launcher.start_edge(spec)
    while True:
        status = _status(supervisor)
        for worker in status.workers:
            _show_worker(worker, steps)
        edge_runs = launcher.edge_runs(spec)
        if edge_runs:
            steps.done("serve", f"listens on {spec.http.host}:{spec.http.port}")
        if edge_runs and status.ready:
            return
        if time.monotonic() > end:
            raise _late(status, spec)
        time.sleep(POLL_S)


def _late(status: ClusterStatus, spec: ClusterSpec) -> DeadlineExceeded:
    late = [
        f"{w.worker_id} ({w.phase})" for w in status.workers if w.state is not WorkerState.READY
    ]
    return DeadlineExceeded(
        f"not ready within {spec.timeouts.start_s:g} s: {', '.join(late) or 'the edge'}; "
        "raise timeouts.start_s, or look at the logs",
        stage=Stage.START,
    )


def _show_worker(worker: WorkerStatus, steps: Steps) -> None:
    """Raises the worker's error when starting again cannot help."""
    if worker.fault and worker.state is not WorkerState.READY:
        error = worker.fault.error()
        if not error.retryable or worker.failures >= START_FAILURES:
            raise error
    if worker.state is WorkerState.READY:
        pids = ", ".join(map(str, worker.rank_pids))
        lossy = f"; lossy: {worker.lossy}" if worker.lossy else ""
        steps.done(worker.worker_id, f"ready at {worker.address}, pid {pids}{lossy}")
    else:
        steps.show(worker.worker_id, worker.phase)


def _suggest(
    console: Console, name: str, slots: tuple[WorkerSlot, ...], model: str, url: str
) -> None:
    """The workers, a request to paste, and what to type next."""
    counts = Counter(slot.role for slot in slots)
    console.print(f"serving with {', '.join(f'{n} {role}' for role, n in counts.items())}\n")
    question = '"messages": [{"role": "user", "content": "What is the capital of France?"}]'
    for line in (
        f"  curl {url}/v1/chat/completions \\",
        "    -H 'Content-Type: application/json' \\",
        f'    -d \'{{"model": "{model}", "temperature": 0, {question}}}\'\n',
        f"Ctrl-C stops it; `{hint('status', name)}` shows its workers.\n",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _watch(supervisor: Any, console: Console) -> NoReturn:
    """Tell of deaths and returns, until interrupted.  Raises WorkerLost when Ray is gone."""
    epochs: dict[WorkerId, Epoch | None] = {}
    heard = time.monotonic()
    while True:
        try:
            status = _status(supervisor)
            heard = time.monotonic()
        except TriremeError as error:
            if time.monotonic() - heard > SILENCE_S:
                raise WorkerLost(
                    f"nothing heard for {SILENCE_S:g} s ({error.message}); start the cluster anew",
                    worker="supervisor",
                ) from error
        else:
            for worker in status.workers:
                _tell_change(worker, epochs, console)
        time.sleep(WATCH_S)


def _tell_change(
    worker: WorkerStatus, epochs: dict[WorkerId, Epoch | None], console: Console
) -> None:
    """Remember whom we saw ready; say when it is lost, and when its successor is."""
    seen = epochs.get(worker.worker_id)
    ready = worker.epoch if worker.state is WorkerState.READY else None
    if ready is None and worker.fault is None:
        return  # a new supervisor has not found it yet
    if worker.worker_id in epochs and ready != seen:
        why = worker.fault.message if worker.fault else ""
        text = f"is back, pid {worker.pid}" if ready else f"lost: {why}; starting another"
        console.print(f"{worker.worker_id} {escape(text)}", soft_wrap=True)
    epochs[worker.worker_id] = ready


def _status(supervisor: Any) -> ClusterStatus:
    status: ClusterStatus = launcher.fetch(supervisor.status.remote(), STATUS_S, "supervisor")
    return status


def _take_down(supervisor: Any, console: Console) -> None:
    try:
        launcher.stop(supervisor, DRAIN_S)
    except TriremeError as error:
        console.print(f"stopped by force: {escape(str(error))}", soft_wrap=True)
    except KeyboardInterrupt:
        console.print("stopped at once")
    else:
        console.print("stopped")
