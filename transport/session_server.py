"""The gRPC server of a worker process: accepts sessions, one `Conversation` each."""

import asyncio
from typing import Any

import grpc

from core.errors import ConfigError, Stage
from transport.conversation import Conversation
from transport.faulty import FaultInjector
from transport.session import ServerSession, SessionCounts, SessionHandler
from transport.wire import METHOD, SERVER_OPTIONS, SERVICE, SessionLimits

__all__ = ["ServerSession", "SessionHandler", "SessionServer"]


class SessionServer:
    """Listens on one address, on the event loop that `start` runs on.

    counts: totals of its sessions.  A peer that sends garbage loses its own stream only.
    """

    def __init__(
        self,
        handler: SessionHandler,
        host: str,
        port: int = 0,
        faults: FaultInjector | None = None,
        limits: SessionLimits | None = None,
    ) -> None:
        """port 0: any free one."""
        self.counts = SessionCounts()
        self._handler = handler
        self._host = f"[{host}]" if ":" in host else host
        self._port = port
        self._faults = faults or FaultInjector()
        self._limits = limits or SessionLimits()
        self._live: dict[Conversation, asyncio.Event] = {}
        self._server: Any = None

    async def start(self) -> str:
        """The address, "host:port".  Raises ConfigError when it cannot be bound."""
        server = grpc.aio.server(options=SERVER_OPTIONS)
        method = grpc.stream_stream_rpc_method_handler(self._session)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: method}),)
        )
        try:
            port = server.add_insecure_port(f"{self._host}:{self._port}")
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {self._host}:{self._port} ({error}); choose another address",
                stage=Stage.START,
                field="port",
            ) from error
        await server.start()
        self._server = server
        return f"{self._host}:{port}"

    async def stop(self, grace_s: float) -> None:
        """End every session: what waits is sent, for `grace_s` seconds at most.

        On return `on_close` has been called for each.  Idempotent.
        """
        server, self._server = self._server, None
        if server is None:
            return
        closed = [asyncio.create_task(event.wait()) for event in self._live.values()]
        for conversation in list(self._live):
            conversation.end("the worker stops")
        await server.stop(grace_s)
        if closed:
            await asyncio.wait(closed, timeout=2 * self._limits.close_s)

    async def _session(self, _requests: object, stream: Any) -> None:
        conversation = Conversation(stream, self._handler, self._faults, self._limits, self.counts)
        closed = self._live[conversation] = asyncio.Event()
        try:
            reason = await conversation.run()
        finally:
            del self._live[conversation]
            closed.set()
        stream.set_code(grpc.StatusCode.ABORTED)
        stream.set_details(reason)
