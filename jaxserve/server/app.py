"""The application: routes, and what is shared between them."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from jaxserve.server.answers import error_response
from jaxserve.server.chat import chat_completions
from jaxserve.server.completions import completions
from jaxserve.server.errors import ApiError
from jaxserve.server.guard import Guard
from jaxserve.server.info import get_model, health, list_models, ready, version
from jaxserve.server.served import Models
from jaxserve.server.settings import ServerConfig


@dataclass
class Lifecycle:
    """Where the server stands between start and end."""

    is_draining: bool = False


def routes() -> list[BaseRoute]:
    return [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{model:path}", get_model, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
    ]


def make_app(
    models: Models,
    config: ServerConfig,
    more_routes: list[BaseRoute] | None = None,
    open_paths: frozenset[str] = frozenset(),
) -> Starlette:
    """The ASGI application.

    Args:
        models: what is served; available to endpoints as `request.app.state.models`.
        config: as `request.app.state.config`.
        more_routes: of pages and the like.
        open_paths: paths that need no API key.
    """
    app = Starlette(
        routes=[*routes(), *(more_routes or [])],
        middleware=[Middleware(Guard, config=config, open_paths=open_paths)],
        exception_handlers={HTTPException: _http_error},
    )
    app.router.redirect_slashes = False
    app.state.models = models
    app.state.config = config
    app.state.lifecycle = Lifecycle()
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such path, wrong method) as error objects."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        return error_response(
            ApiError(405, f"{request.method} is not allowed here", headers=headers)
        )
    return error_response(
        ApiError(error.status_code, "there is nothing at this path", code="not_found")
    )
