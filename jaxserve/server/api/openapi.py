"""Endpoint GET /openapi.json, made from the schemas that requests are checked against."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import jaxserve
from jaxserve.server.api.infill import InfillRequest, InfillResponse
from jaxserve.server.api.info import (
    HealthResponse,
    LoadResponse,
    ModelCard,
    ModelList,
    ServerInfo,
    VersionResponse,
)
from jaxserve.server.api.streaming import json_response
from jaxserve.server.api.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from jaxserve.server.schema.anthropic import (
    CountRequest,
    CountResponse,
    MessagesRequest,
    MessagesResponse,
)
from jaxserve.server.schema.generate import GenerateRequest, GenerateResponse
from jaxserve.server.schema.openai import (
    BatchChatRequest,
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    ErrorResponse,
)
from jaxserve.server.schema.responses import ResponsesRequest, ResponsesResponse

# Types of request and answer of every endpoint that takes a body; those with `stream` can stream.
POSTS: dict[str, tuple[type, Any]] = {
    "/v1/completions": (CompletionRequest, CompletionResponse),
    "/v1/chat/completions": (ChatRequest, ChatResponse),
    "/v1/chat/completions/batch": (BatchChatRequest, ChatResponse),
    "/v1/responses": (ResponsesRequest, ResponsesResponse),
    "/v1/messages": (MessagesRequest, MessagesResponse),
    "/v1/messages/count_tokens": (CountRequest, CountResponse),
    "/tokenize": (TokenizeRequest, TokenizeResponse),
    "/detokenize": (DetokenizeRequest, DetokenizeResponse),
    "/inference/v1/generate": (GenerateRequest, GenerateResponse),
    "/v1/completions/render": (CompletionRequest, list[GenerateRequest]),
    "/v1/chat/completions/render": (ChatRequest, GenerateRequest),
    "/v1/messages/render": (MessagesRequest, GenerateRequest),
    "/infill": (InfillRequest, InfillResponse),
}
GETS: dict[str, type | None] = {
    "/v1/models": ModelList,
    "/v1/models/{model}": ModelCard,
    "/health": HealthResponse,
    "/ready": HealthResponse,
    "/version": VersionResponse,
    "/load": LoadResponse,
    "/tokenizer_info": TokenizerInfo,
    "/server_info": ServerInfo,
    "/metrics": None,
}
# Ends of paths that answer at once whatever `stream` says.
_WHOLE = ("/batch", "/render")
# What POST /invocations stands for.
_INVOKED = ("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch")
_REFUSALS = {
    "400": "A field is wrong; `param` names it.",
    "401": "No valid API key.",
    "403": "A Host or Origin that is not served.",
    "404": "No such model or path.",
    "408": "The body came too slowly.",
    "413": "The body is too large.",
    "415": "Not application/json.",
    "429": "The queue is full; see Retry-After.",
    "431": "The headers are too large.",
    "500": "The engine failed at this request.",
    "503": "The server stops, or the request waited too long.",
    "504": "The request took too long.",
}


def document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    types = [kind for pair in POSTS.values() for kind in pair]
    types += [kind for kind in GETS.values() if kind is not None]
    types.append(ErrorResponse)
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    by_type = dict(zip(types, schemas, strict=True))
    refusals = {status: _answer(text, by_type[ErrorResponse]) for status, text in _REFUSALS.items()}
    paths: dict[str, Any] = {}
    for path, (requested, answered) in POSTS.items():
        good = {"200": _answer("The answer.", by_type[answered])}
        if hasattr(requested, "stream") and not path.endswith(_WHOLE):
            # A schema could only be that of each event.
            good["200"]["content"]["text/event-stream"] = {}
        paths[path] = {"post": _post(path, by_type[requested], good | refusals)}
    ways = [POSTS[path] for path in _INVOKED]
    asked, answers = ([by_type[kind] for kind in kinds] for kinds in zip(*ways, strict=True))
    good = {"200": _answer("The answer.", {"anyOf": answers})}
    good["200"]["content"]["text/event-stream"] = {}
    paths["/invocations"] = {"post": _post("/invocations", {"anyOf": asked}, good | refusals)}
    for path, answered in GETS.items():
        good: dict[str, Any] = {"description": "Metrics.", "content": {"text/plain": {}}}
        if answered is not None:
            good = _answer("The answer.", by_type[answered])
        paths[path] = {"get": {"operationId": _name(path), "responses": {"200": good, **refusals}}}
    paths["/v1/models/{model}"]["get"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": jaxserve.__version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _post(path: str, schema: dict[str, Any], responses: dict[str, Any]) -> dict[str, Any]:
    return {
        "operationId": _name(path),
        "requestBody": {"required": True, "content": _json(schema)},
        "responses": responses,
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _answer(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": _json(schema)}


def _name(path: str) -> str:
    return path.strip("/").translate(str.maketrans("/{}", "_  ")).replace(" ", "")


async def openapi(request: Request) -> Response:
    """Answer with the document."""
    return json_response(document())
