"""The HTTP edge as an ASGI app: OpenAI-compatible routes and those for operators.

Whoever hosts it (Ray Serve, uvicorn, a test) builds an `EdgeContext`; nothing here knows which.
"""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Lifespan

from core.errors import TriremeError
from router.edge import EdgeContext, ReadyState
from router.exchange import Exchange
from router.prepare import check_model, prepare_chat, prepare_completion
from router.schema_errors import error_body, error_headers, http_error_body, internal
from router.status import operator_routes

__all__ = ["EdgeContext", "ReadyState", "create_app"]


def create_app(edge: EdgeContext, lifespan: Lifespan[Starlette] | None = None) -> Starlette:
    """Every error of every route has OpenAI's shape.  lifespan: the host's start and stop."""
    chat, completions = "/v1/chat/completions", "/v1/completions"
    app = Starlette(
        routes=[
            *_model_routes(edge),
            Route(chat, Exchange(edge, chat, prepare_chat), methods=["POST"]),
            Route(completions, Exchange(edge, completions, prepare_completion), methods=["POST"]),
            *operator_routes(edge),
        ],
        exception_handlers={
            HTTPException: _on_http_error,
            TriremeError: _on_error,
            Exception: _on_unexpected,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


def _model_routes(edge: EdgeContext) -> list[Route]:
    created = int(edge.unix_time())

    def model() -> dict[str, object]:
        return {
            "id": edge.model_name,
            "object": "model",
            "created": created,
            "owned_by": "trireme",
            "max_model_len": edge.max_model_len(),
        }

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model()]})

    async def one_model(request: Request) -> Response:
        check_model(edge, request.path_params["name"])
        return JSONResponse(model())

    return [Route("/v1/models", models), Route("/v1/models/{name:path}", one_model)]


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    return JSONResponse(http_error_body(error.status_code, what), error.status_code, error.headers)


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, TriremeError)
    return JSONResponse(error_body(error), error.status, error_headers(error))


async def _on_unexpected(_: Request, error: Exception) -> Response:
    """Starlette raises `error` on after this, so that the server logs it."""
    return JSONResponse(error_body(internal()), internal().status)
