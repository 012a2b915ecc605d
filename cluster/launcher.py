"""Starts and stops the processes of a cluster on this machine: Ray, supervisor, Serve.

Ray stays on loopback whatever `http.host` says: who reaches its ports runs code in it.
Ray is imported inside the functions: `--help` and `status` must not wait for it.
"""

import logging
import os
import signal
import socket
from contextlib import closing
from typing import Any

from cluster.layout import WorkerSlot
from cluster.names import supervisor_name
from core.errors import ConfigError, Stage, WorkerLost
from core.spec import ClusterSpec

NAMESPACE = "trireme"
LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 80 << 20
SUPERVISOR_S = 30.0
STOP_MARGIN_S = 15.0

RAY_ENVIRONMENT = {
    # Ray turns a node address of 127.0.0.1 into the machine's own unless clusters are "off".
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def check_address(host: str, port: int) -> None:
    """Raises ConfigError when nobody could listen on host:port, before anything starts."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with closing(socket.socket(family, kind, proto)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise ConfigError(
            f"http.host: {host!r} is no address of this machine ({error.strerror})",
            stage=Stage.START,
            field="http.host",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"http.port: cannot listen on {host}:{port} ({os.strerror(error.errno or 0)}); "
            "choose another with --port",
            stage=Stage.START,
            field="http.port",
        ) from None


def start_ray(slots: tuple[WorkerSlot, ...], cores: int) -> str:
    """Start a private Ray on this machine; the folder with its logs.

    Raises WorkerLost when Ray does not come up.  Ray takes over SIGTERM; see `serve`.
    """
    os.environ.update(RAY_ENVIRONMENT)
    import ray
    from ray._private import ray_constants

    logging.getLogger("ray").setLevel(logging.ERROR)
    ray_constants.ENABLE_RAY_CLUSTER = False  # when ray was imported before the line above
    # Twice what the workers take: a replacement need not wait for Ray to count the dead one out.
    cpus = max(cores, 2 * sum(int(slot.needs["CPU"]) for slot in slots))
    try:
        context = ray.init(
            address="local",  # never join what RAY_ADDRESS names
            namespace=NAMESPACE,
            num_cpus=cpus,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            _node_ip_address=LOOPBACK,
            # Ray's default of 15 would starve a model beside anything else that computes.
            _system_config={"worker_niceness": 0},
        )
    except (RuntimeError, ConnectionError, OSError, ValueError) as error:
        raise WorkerLost(
            f"Ray did not start: {error}; look for free memory and disk, and in Ray's own logs",
            stage=Stage.START,
            worker="ray",
        ) from error
    return os.path.join(context.address_info["session_dir"], "logs")


def start_supervisor(spec: ClusterSpec, slots: tuple[WorkerSlot, ...], program: str) -> Any:
    """The handle of the supervisor actor, which starts the workers by itself.

    program: "module:class" of the worker.  Raises DeadlineExceeded, WorkerLost.
    """
    import ray

    from cluster.supervisor import Supervisor, SupervisorBoot

    supervisor = (
        ray.remote(Supervisor)
        .options(
            name=supervisor_name(spec.name),
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
        )
        .remote(SupervisorBoot(spec, slots, program))
    )
    fetch(supervisor.status.remote(), SUPERVISOR_S, "supervisor")
    return supervisor


def start_edge(spec: ClusterSpec) -> None:
    """Start Serve's proxy and begin to start the HTTP edge; `edge_runs` tells how it went.

    Raises WorkerLost.
    """
    from ray import serve
    from ray.exceptions import RayError

    from actors.edge import edge_application

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    application = edge_application(spec, supervisor_name(spec.name), NAMESPACE)
    try:
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": spec.http.host, "port": spec.http.port},
            logging_config=quiet,
        )
        serve.run_many(
            [serve.RunTarget(application, name=spec.name, logging_config=quiet)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
    except (RuntimeError, TimeoutError, RayError) as error:
        raise _edge_lost(str(error)) from error


def edge_runs(spec: ClusterSpec) -> bool:
    """Whether the edge answers.  Raises WorkerLost when it never will."""
    from ray import serve
    from ray.exceptions import RayError

    try:
        edge = serve.status().applications[spec.name]
    except RayError as error:
        raise _edge_lost(str(error)) from error
    if edge.status == "DEPLOY_FAILED":
        raise _edge_lost("; ".join(d.message for d in edge.deployments.values()))
    return bool(edge.status == "RUNNING")


def _edge_lost(told: str) -> WorkerLost:
    """Of a traceback, the last line; the rest is in the logs."""
    why = told.strip().splitlines()[-1] if told.strip() else "no reason given"
    return WorkerLost(f"the HTTP edge did not start: {why}", stage=Stage.START, worker="edge")


def fetch(ref: Any, timeout_s: float, whom: str) -> Any:
    """The answer to a Ray call.  Raises DeadlineExceeded, WorkerLost, or the callee's error."""
    import ray
    from ray.exceptions import RayError

    from actors.shell import translated

    try:
        return ray.get(ref, timeout=timeout_s)
    except RayError as error:
        raise translated(error, whom) from error


def stop(supervisor: Any, drain_s: float) -> None:
    """Drain and stop the workers, if there is a supervisor, then end every process of Ray.

    Interrupted (a second Ctrl-C), it goes on to the end without draining.
    """
    import ray

    try:
        if supervisor is not None:
            fetch(supervisor.shutdown.remote(drain_s), drain_s + STOP_MARGIN_S, "supervisor")
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # nothing may cut the clean-up short
        ray.shutdown(wait_for_processes=True)
