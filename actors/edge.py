"""The Ray Serve shell around the edge, and its view of the supervisor."""

import asyncio
import logging
from typing import Any

import ray

from actors.ingress_feed import Members
from actors.shell import answer
from core.errors import TriremeError
from core.spec import ClusterSpec

log = logging.getLogger(__name__)

RETRY_S = 0.5
GRACE_S = 5.0
REPLICA_REQUESTS = 100_000
"""Admission is the router's; Serve must never queue or refuse on its own."""


class SupervisorFeed:
    """Membership for the edge.  While the supervisor is away the last known one stays valid."""

    def __init__(self, supervisor: str, namespace: str) -> None:
        self._name = supervisor
        self._namespace = namespace
        self._actor: Any = None
        self._last: tuple[int, Members] = (0, ())
        self._away = False

    async def watch(self, version: int, timeout_s: float) -> tuple[int, Members]:
        """See `Feed`."""
        try:
            if self._actor is None:
                # On a thread: with Ray's head away this look-up blocks, and streams must go on.
                self._actor = await asyncio.to_thread(
                    ray.get_actor, self._name, namespace=self._namespace
                )
            ref = self._actor.watch.remote(version, timeout_s)
            self._last = await answer(ref, timeout_s + GRACE_S, "supervisor", "watch")
            self._tell(away=False, why="is back")
        except (TriremeError, ValueError) as error:
            self._actor = None
            self._tell(away=True, why=f"is away: {error}")
            await asyncio.sleep(RETRY_S)
        return self._last

    def _tell(self, away: bool, why: str) -> None:
        if away != self._away:
            self._away = away
            log.warning("supervisor %s; going on with %d workers", why, len(self._last[1] or ()))


class EdgeDeployment:
    """The ASGI app of `actors.ingress` in a Serve replica."""

    def __init__(self, spec: ClusterSpec, supervisor: str, namespace: str) -> None:
        self._spec = spec
        self._feed = SupervisorFeed(supervisor, namespace)

    def __serve_build_asgi_app__(self) -> Any:
        """Serve calls this once, in the replica, before the replica listens."""
        _close_replica_port()
        from actors.ingress import build_app  # the launcher, which also imports this, is light

        return build_app(self._spec, self._feed)


def _close_replica_port() -> None:
    """Every Serve replica opens a gRPC port on all addresses for calls between deployments, and
    unpickles what comes in.  We have one deployment, called through Ray; no setting closes the
    port, so it goes to loopback."""
    from ray.serve._private import replica

    bind = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, _: bind(server, "127.0.0.1:0")


def edge_application(spec: ClusterSpec, supervisor: str, namespace: str) -> Any:
    """The Serve application.  Serve is imported here: it takes a second."""
    from ray import serve

    deployment = serve.deployment(
        serve.ingress()(EdgeDeployment),
        name="edge",
        max_ongoing_requests=REPLICA_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=GRACE_S,
        graceful_shutdown_wait_loop_s=0.2,
    )
    return deployment.bind(spec, supervisor, namespace)
