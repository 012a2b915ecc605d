"""What operators ask: alive, ready, metrics, status."""

import asyncio

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.edge import EdgeContext, ReadyState

READY_S = 5.0


def operator_routes(edge: EdgeContext) -> list[Route]:
    """/healthz: this process answers.  /readyz: a path through the workers exists."""

    async def healthz(_: Request) -> Response:
        return JSONResponse({"alive": True})

    async def readyz(_: Request) -> Response:
        try:
            async with asyncio.timeout(READY_S):
                state = await edge.ready()
        except TimeoutError:
            state = ReadyState(False, f"the readiness check took longer than {READY_S:g} s")
        status = 200 if state.ready else 503
        return JSONResponse({"ready": state.ready, "reason": state.reason}, status)

    async def metrics(_: Request) -> Response:
        return Response(edge.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def status(_: Request) -> Response:
        return JSONResponse(edge.status())

    return [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/metrics", metrics),
        Route("/status", status),
    ]
