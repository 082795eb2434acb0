"""The ASGI application: its routes, its middleware, and the state that endpoints share."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from jaxserve.server.api import (
    anthropic,
    chat,
    completions,
    files,
    infill,
    info,
    kept_conversations,
    kept_responses,
    metrics,
    openapi,
    responses,
    token_io,
    tokens,
    weights,
)
from jaxserve.server.api.batch_service import BatchService, InnerClient
from jaxserve.server.api.endpoint_request import Notices
from jaxserve.server.api.streaming import error_response, json_response
from jaxserve.server.http.early_refusals import EarlyRefusals
from jaxserve.server.http.guard import FILES, WEIGHTS, Guard
from jaxserve.server.http.head_checks import HeadChecks
from jaxserve.server.kept.batches import Batches
from jaxserve.server.kept.conversation_store import ConversationStore
from jaxserve.server.kept.files import FileStore
from jaxserve.server.kept.response_store import ResponseStore
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.served.admission import Admission, Lifecycle, Place
from jaxserve.server.served.models import NO_LIMIT, Models
from jaxserve.server.settings import ServerConfig
from jaxserve.settings.compat import UnservedRoute, unserved_routes

# Paths whose requests generate tokens.
_DRAWING = frozenset(
    "/v1/completions /v1/chat/completions /v1/responses /v1/messages /infill "
    "/inference/v1/generate".split()
)
# Other names of endpoints, which llama.cpp's server has or routers request.
_ALIASES = {
    "/completions": "/v1/completions",
    "/chat/completions": "/v1/chat/completions",
    "/responses": "/v1/responses",
    "/responses/input_tokens": "/v1/responses/input_tokens",
    "/models": "/v1/models",
    "/v1/health": "/health",
    "/ping": "/health",
    "/get_model_info": "/model_info",
    "/get_server_info": "/server_info",
}

# Paths whose bodies may have any Content-Type, or are empty.
_BODILESS = frozenset(
    "/ping /reset_prefix_cache /pause /resume /sleep /wake_up /init_weight_transfer_engine "
    "/start_weight_update /finish_weight_update".split()
)

_ROUTES = (
    ("POST", "/v1/completions", completions.completions),
    ("POST", "/v1/chat/completions", chat.chat_completions),
    ("POST", "/v1/responses", responses.responses),
    ("POST", "/v1/responses/input_tokens", responses.count_input_tokens),
    ("GET", "/v1/responses/{response_id}", kept_responses.get_response),
    ("DELETE", "/v1/responses/{response_id}", kept_responses.delete_response),
    ("POST", "/v1/responses/{response_id}/cancel", kept_responses.cancel_response),
    ("GET", "/v1/responses/{response_id}/input_items", kept_responses.list_input_items),
    ("POST", "/v1/conversations", kept_conversations.create_conversation),
    ("GET", "/v1/conversations/{conversation_id}", kept_conversations.get_conversation),
    ("POST", "/v1/conversations/{conversation_id}", kept_conversations.update_conversation),
    ("DELETE", "/v1/conversations/{conversation_id}", kept_conversations.delete_conversation),
    ("POST", "/v1/conversations/{conversation_id}/items", kept_conversations.add_items),
    ("GET", "/v1/conversations/{conversation_id}/items", kept_conversations.list_items),
    ("GET", "/v1/conversations/{conversation_id}/items/{item_id}", kept_conversations.get_item),
    (
        "DELETE",
        "/v1/conversations/{conversation_id}/items/{item_id}",
        kept_conversations.delete_item,
    ),
    ("POST", "/v1/messages", anthropic.messages),
    ("POST", "/v1/messages/count_tokens", anthropic.count_tokens),
    ("POST", FILES, files.upload_file),
    ("GET", FILES, files.list_files),
    ("GET", "/v1/files/{file_id}", files.get_file),
    ("DELETE", "/v1/files/{file_id}", files.delete_file),
    ("GET", "/v1/files/{file_id}/content", files.get_content),
    ("POST", "/v1/batches", files.create_batch),
    ("GET", "/v1/batches", files.list_batches),
    ("GET", "/v1/batches/{batch_id}", files.get_batch),
    ("POST", "/v1/batches/{batch_id}/cancel", files.cancel_batch),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
    ("POST", "/reset_prefix_cache", info.reset_prefix_cache),
    ("POST", "/pause", weights.pause),
    ("POST", "/resume", weights.resume),
    ("GET", "/is_paused", weights.is_paused),
    ("POST", "/sleep", weights.sleep),
    ("POST", "/wake_up", weights.wake_up),
    ("GET", "/is_sleeping", weights.is_sleeping),
    ("POST", "/init_weight_transfer_engine", weights.init_transfer),
    ("POST", "/start_weight_update", weights.start_update),
    ("POST", WEIGHTS, weights.update_weights),
    ("POST", "/finish_weight_update", weights.finish_update),
    ("GET", "/get_world_size", weights.world_size),
    ("POST", "/inference/v1/generate", token_io.generate),
    ("POST", "/v1/completions/render", token_io.render_completions),
    ("POST", "/v1/chat/completions/render", token_io.render_chat),
    ("POST", "/v1/messages/render", token_io.render_messages),
    ("GET", "/tokenizer_info", tokens.tokenizer_info),
    ("POST", "/infill", infill.infill),
    ("GET", "/v1/models", info.list_models),
    ("GET", "/v1/models/{model:path}", info.get_model),
    ("GET", "/health", info.health),
    ("GET", "/ready", info.ready),
    ("GET", "/version", info.version),
    ("GET", "/load", info.load),
    ("GET", "/server_info", info.server_info),
    ("GET", "/model_info", info.model_info),
    ("GET", "/metrics", metrics.metrics),
    ("GET", "/openapi.json", openapi.openapi),
)


def routes() -> list[BaseRoute]:
    api = [Route(path, endpoint, methods=[method]) for method, path, endpoint in _ROUTES]
    named = {route.path: route for route in api}
    aliases = [
        Route(path, named[other].endpoint, methods=list(named[other].methods or ()))
        for path, other in _ALIASES.items()
    ]
    return [*api, *aliases, Route("/ping", info.health, methods=["POST"])]


def _reads_no_body(path: str) -> bool:
    return (
        path in _BODILESS
        or path.endswith("/cancel")
        or any(route.matches(path) for route in unserved_routes())
    )


class UnservedRoutes(BaseRoute):
    """Last route of the application, for paths of other inference servers that are not served.

    A request to such a path gets a 404 error with a suggestion.
    """

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return how an HTTP request matches the routes that jaxserve does not serve.

        Args:
            scope: ASGI scope of the request, with its path and method.

        Returns:
            `Match.FULL` for a route with the path and the method, `Match.PARTIAL` for one with
            another method, or `Match.NONE`. The second value holds the route to add to the scope as
            `jaxserve.route`, and is empty without a match.
        """
        partial: tuple[Match, Scope] = Match.NONE, {}
        for route in unserved_routes():
            if scope["type"] != "http" or not route.matches(scope["path"]):
                continue
            scope_of_route = {"jaxserve.route": route}
            if scope["method"] in _methods(route):
                return Match.FULL, scope_of_route
            if partial[0] is Match.NONE:
                partial = Match.PARTIAL, scope_of_route
        return partial

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request to a matched route with a 404 error that suggests an alternative.

        The error has the form of the route's API: Ollama, llama.cpp or OpenAI.

        Raises:
            HTTPException: 405, the route does not have the request's method.
        """
        route: UnservedRoute = scope["jaxserve.route"]
        if scope["method"] not in _methods(route):
            raise HTTPException(405, headers={"Allow": ", ".join(_methods(route))})
        status = "not served" if route.instead.startswith("yet: ") else "not served:"
        message = f"{route.path.replace(':path}', '}')} is {status} {route.instead}"
        if route.api == "ollama":
            response = json_response({"error": message}, 404)
        elif route.api == "llama":
            error = {"code": 404, "message": message, "type": "not_supported_error"}
            response = json_response({"error": error}, 404)
        else:  # a status of 500 or more would make OpenAI's client try again
            response = error_response(ApiError(404, message, code="not_supported"))
        await response(scope, receive, send)


def _methods(route: UnservedRoute) -> list[str]:
    return [*route.methods, "HEAD"] if "GET" in route.methods else route.methods


class App:
    """ASGI application of the server, with the models, settings and stores of its endpoints.

    An endpoint finds this object as `request.app.state.served`.

    Args:
        models: the served models.
        config: the server's settings.
        more_routes: routes besides those of the API, such as the web page's.
        open_paths: paths that need no API key, besides the paths of the health checks.
        files: the store of uploaded files, or None if the server has no folder for files. Batches
            need it.

    Attributes:
        early_refusals: refuses requests to a full queue before connections parse them.
    """

    def __init__(
        self,
        models: Models,
        config: ServerConfig,
        more_routes: Iterable[BaseRoute] = (),
        open_paths: frozenset[str] = frozenset(),
        files: FileStore | None = None,
    ) -> None:
        self.models = models
        self.config = config
        self.lifecycle = Lifecycle()
        self.notices = Notices()
        bounds = (
            config.max_stored_responses,
            config.max_stored_response_bytes,
            config.stored_response_seconds,
        )
        self.responses, self.conversations = ResponseStore(*bounds), ConversationStore(*bounds)
        checks = HeadChecks(config, open_paths)
        drawing = [*_DRAWING, *(alias for alias, path in _ALIASES.items() if path in _DRAWING)]
        self.early_refusals = EarlyRefusals(
            config,
            checks,
            drawing,
            self._count_free,
            partial(self.check_room, is_new=True),
            self._take_place,
        )
        door = Middleware(
            Guard,
            config=config,
            checks=checks,
            lifecycle=self.lifecycle,
            check_room=self.check_room,
            reads_no_body=_reads_no_body,
        )
        middleware = [door]
        if config.allowed_origins:
            middleware.insert(
                0,
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(config.allowed_origins),
                    allow_methods=list(config.allowed_methods or ["*"]),
                    allow_headers=list(config.allowed_headers or ["*"]),
                    allow_credentials=config.allow_credentials,
                ),
            )
        self.asgi = Starlette(
            routes=[*routes(), *more_routes, UnservedRoutes()],
            middleware=middleware,
            exception_handlers={HTTPException: _http_error},
        )
        self.asgi.router.redirect_slashes = False
        self.asgi.state.served = self
        self.files = files
        self.batches: Batches | None = None
        if files is not None:
            client = InnerClient(self.asgi, config, is_behind=True)
            self.batches = Batches(files, BatchService(models, client))

    def _early_queue(self) -> Admission | None:
        # The queue of the only model. With several models the body names the queue.
        models = self.models.all
        return models[0].admission if len(models) == 1 and not self.lifecycle.is_draining else None

    def _count_free(self) -> int:
        queue = self._early_queue()
        return NO_LIMIT if queue is None else queue.num_free

    def _take_place(self) -> Place | None:
        queue = self._early_queue()
        return None if queue is None else Place(queue)

    def check_room(self, path: str, *, is_new: bool = False) -> None:
        """Check that a request to a path can be admitted, by the path alone.

        Only paths whose requests generate tokens are checked. If the server has several models, the
        queue is checked later, since the body names the model.

        Args:
            path: path of the request, without the root path.
            is_new: whether the queue's places for requests that are being read count as taken.

        Raises:
            ApiError: 503, the server is stopping.
            Overloaded: the server has one model, and its queue is full.
        """
        if _ALIASES.get(path, path) not in _DRAWING:
            return
        if self.lifecycle.is_draining:
            raise ApiError(503, "the server is stopping", code="shutting_down")
        if len(self.models.all) == 1:
            self.models.all[0].admission.check(1, 1, is_new=is_new)


async def _http_error(request: Request, error: Exception) -> Response:
    # Starlette's own refusals: an unknown path or a wrong method.
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        return error_response(
            ApiError(405, f"{request.method} is not allowed here", headers=headers)
        )
    return error_response(
        ApiError(error.status_code, "there is nothing at this path", code="not_found")
    )
