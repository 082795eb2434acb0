"""Routes of vLLM, OpenAI, llama.cpp and Ollama that are not served, each with what to do instead.

Clients read an answer in the form of the API that they speak, and none of them tries again:
OpenAI's client would after a status of 500 or more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from jaxserve.server.api.streaming import error_response, json_response
from jaxserve.server.schema.errors import ApiError

Form = Callable[[str], Response]

# Begins the reason of a route that a later version serves.
_YET = "yet: "
_SOON = f"{_YET}POST /v1/completions with logprobs scores the tokens of an answer"
_GENERATES = "models generate text here, and nothing else"
_COMPLETE = "send POST /v1/completions: {prompt, max_tokens}"
_CHAT = "send POST /v1/chat/completions: {messages, max_tokens}"
_MODELS = "GET /v1/models lists the models"
_LOADED = "models are those that the server was started with"
_LORA = "adapters are not served: merge them into the checkpoint"
_WEIGHTS = "weights stay as they are until the server ends"
_AWAKE = "the server keeps the device until it ends"
_CACHE = "cached prefixes go when their pages are needed; cache_salt keeps requests apart"
_PAUSE = "running requests end, or are given up by their clients"
_ONE_PROCESS = "one process serves its models, and needs no other beside it"
_PROFILE = "--profile-start records the start, and /metrics has the times of requests"
_RENDER = "POST /tokenize takes messages, and answers with their token ids"
_COUNT = "POST /tokenize and POST /v1/messages/count_tokens count tokens"
_NO_CONVERSATIONS = "continue a response by previous_response_id or conversation"
_TEXT_ONLY = "only text is served"
_NO_UPLOADS = "files are those of batches, and come whole: POST /v1/files"
_BATCHES = "send POST /v1/files, then POST /v1/batches, whose lines are requests of OpenAI's form"
_NO_TOOLS = "no tool is run by the server: clients run what the model calls"

# Paths by method and reason; a name in braces stands for a part, one with `:path` for any more.
_OPENAI: dict[str, str] = {
    "POST /v1/embeddings /v2/embed /pooling /classify /score /v1/score /rerank /v1/rerank "
    "/v2/rerank /v1/systemone /v1/moderations": _GENERATES,
    "POST /generative_scoring /v1/decisions": _SOON,
    "POST /v1/audio/transcriptions /v1/audio/translations /v1/audio/speech /audio/transcriptions "
    "/v1/images/generations /v1/images/edits /v1/images/variations": _TEXT_ONLY,
    "GET /v1/realtime": _TEXT_ONLY,
    "POST /v1/load_lora_adapter /v1/unload_lora_adapter": _LORA,
    "POST /sleep /wake_up /release_kv_cache_memory": _AWAKE,
    "GET /is_sleeping": _AWAKE,
    "POST /reset_mm_cache /reset_encoder_cache": _CACHE,
    "POST /pause /resume /abort_requests /inference/v1/abort_requests": _PAUSE,
    "GET /is_paused": _PAUSE,
    "POST /init_weight_transfer_engine /start_weight_update /start_draft_weight_update "
    "/update_weights /finish_weight_update /shutdown_weight_transfer_engine "
    "/update_weight_version /weight_checker": _WEIGHTS,
    "GET /weight_info": _WEIGHTS,
    "POST /collective_rpc /scale_elastic_ep /is_scaling_elastic_ep /fault_tolerance/apply": (
        _ONE_PROCESS
    ),
    "GET /get_world_size /fault_tolerance/status /kv_event_sources": _ONE_PROCESS,
    "POST /start_profile /stop_profile": _PROFILE,
    "POST /v1/responses/render /v1/chat/completions/derender /v1/completions/derender": _RENDER,
    "POST /v1/chat/completions/input_tokens /chat/completions/input_tokens": _COUNT,
    "POST /cohere/v2/chat /cohere/v2/chat/render": _CHAT,
    "POST /invocations": "send POST /v1/chat/completions or POST /v1/completions",
    "POST /v1/chat/completions/batch": (
        "send POST /v1/chat/completions once for each conversation, or POST /v1/batches"
    ),
    "GET /docs /redoc": "the API's one document is GET /openapi.json",
    "GET POST DELETE /v1/threads /v1/threads/{more:path} /v1/assistants "
    "/v1/assistants/{more:path}": _NO_CONVERSATIONS,
    "POST /v1/responses/compact": _NO_CONVERSATIONS,
    "GET POST DELETE /v1/uploads /v1/uploads/{more:path} /v1/vector_stores "
    "/v1/vector_stores/{more:path}": _NO_UPLOADS,
    "GET POST /v1/fine_tuning/{more:path}": _WEIGHTS,
    "GET POST DELETE /v1/messages/batches /v1/messages/batches/{more:path}": _BATCHES,
    "POST /v1/complete": f"{_COMPLETE}, or POST /v1/messages: {{messages, max_tokens}}",
    "POST /generate /generate_stream": _COMPLETE,
    "GET POST DELETE /v1/live/sessions /v1/live/sessions/{more:path} /v1/realtime/{more:path}": (
        _TEXT_ONLY
    ),
    "GET POST DELETE /v1/videos /v1/videos/{more:path}": _TEXT_ONLY,
    "GET POST DELETE /v1/skills /v1/skills/{more:path}": _NO_TOOLS,
    "GET POST DELETE /v1/containers /v1/containers/{more:path}": _NO_TOOLS,
    "GET POST DELETE /v1/evals /v1/evals/{more:path}": (
        "answers are not rated: an evaluation is a client of /v1/completions, with echo and "
        "logprobs, or of /v1/chat/completions"
    ),
}
_LLAMA: dict[str, str] = {
    "POST /completion": f"{_COMPLETE}; n_predict is max_tokens, cache_prompt is always so",
    "POST /embedding /embeddings /reranking /v1/reranking": _GENERATES,
    "POST /apply-template": _RENDER,
    "GET POST /props": f"{_MODELS}, with max_model_len; settings are those of the start",
    "GET /slots": "GET /metrics counts what runs and waits, and the page at / shows it",
    "POST /slots/{id}": "pages of the KV cache are not saved",
    "GET POST /lora-adapters": _LORA,
    "POST DELETE /models": _LOADED,
    "POST /models/load /models/unload": _LOADED,
    "GET /models/sse": _LOADED,
    "POST /v1/chat/completions/control": "a request ends when its client closes the connection",
    "GET /v1/stream": "set stream in a request: its answer comes as events",
    "POST /v1/streams/lookup": "set stream in a request: its answer comes as events",
    "GET POST /tools": _NO_TOOLS,
    "GET POST /cors-proxy": "the server fetches nothing for its clients",
}
_OLLAMA: dict[str, str] = {
    "POST /api/generate": _COMPLETE,
    "POST /api/chat": _CHAT,
    "POST /api/embed /api/embeddings": _GENERATES,
    "GET /api/tags /api/ps": _MODELS,
    "POST /api/show": "GET /v1/models/NAME shows a model",
    "GET /api/version": "GET /version says which jaxserve this is",
    "POST /api/create /api/pull /api/push /api/copy": _LOADED,
    "DELETE /api/delete": _LOADED,
    "HEAD POST /api/blobs/{digest}": _LOADED,
}


def _openai_error(message: str) -> Response:
    return error_response(ApiError(404, message, code="not_supported"))


def _llama_error(message: str) -> Response:
    body = {"code": 404, "message": message, "type": "not_supported_error"}
    return json_response({"error": body}, 404)


def _ollama_error(message: str) -> Response:
    return json_response({"error": message}, 404)


def _route(path: str, methods: list[str], form: Form, message: str) -> Route:
    shown = path.replace(":path}", "}")
    said = f"not served {message}" if message.startswith(_YET) else f"not served: {message}"

    async def answer(request: Request) -> Response:
        return form(f"{shown} is {said}")

    return Route(path, answer, methods=methods)


def _routes(rows: dict[str, str], form: Form) -> list[Route]:
    made = []
    for row, message in rows.items():
        words = row.split()
        methods = [word for word in words if not word.startswith("/")]
        paths = [word for word in words if word.startswith("/")]
        made += [_route(path, methods, form, message) for path in paths]
    return made


@functools.cache
def unserved_routes() -> tuple[Route, ...]:
    """Return the routes; making them takes 50 ms, which no start should wait for."""
    return (
        *_routes(_OPENAI, _openai_error),
        *_routes(_LLAMA, _llama_error),
        *_routes(_OLLAMA, _ollama_error),
    )


class UnservedRoutes(BaseRoute):
    """All of them as one route, behind those that are served."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return the first whole match, or else the first that differs in its method."""
        partial: tuple[Match, Scope] = Match.NONE, {}
        for route in unserved_routes():
            match, found = route.matches(scope)
            found = {**found, "jaxserve.route": route}
            if match is Match.FULL:
                return match, found
            if match is Match.PARTIAL and partial[0] is Match.NONE:
                partial = match, found
        return partial

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await scope["jaxserve.route"].handle(scope, receive, send)


def is_unserved(path: str) -> bool:
    """Return whether a path is here, so that nothing of a request's body is read."""
    scope = {"type": "http", "path": path, "method": "POST"}
    return any(route.matches(scope)[0] is not Match.NONE for route in unserved_routes())
