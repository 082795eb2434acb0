"""Endpoint GET /openapi.json: a document generated from the schemas that check requests."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import jaxserve
from jaxserve.server.api import info, tokens
from jaxserve.server.api.infill import InfillRequest, InfillResponse
from jaxserve.server.api.streaming import json_response
from jaxserve.server.schema import anthropic, files, openai, response_items, weights
from jaxserve.server.schema.generate import GenerateRequest, GenerateResponse
from jaxserve.server.schema.responses import CountInputRequest, ResponsesRequest

_CONVERSATION = "/v1/conversations/{conversation_id}"
# Types of the request and the answer of each POST endpoint. With a field `stream` it can stream.
POSTS: dict[str, tuple[type, Any]] = {
    "/v1/completions": (openai.CompletionRequest, openai.CompletionResponse),
    "/v1/chat/completions": (openai.ChatRequest, openai.ChatResponse),
    "/v1/responses": (ResponsesRequest, response_items.ResponsesResponse),
    "/v1/responses/input_tokens": (CountInputRequest, response_items.InputTokens),
    "/v1/conversations": (response_items.ConversationRequest, response_items.ConversationObject),
    _CONVERSATION: (response_items.ConversationUpdate, response_items.ConversationObject),
    f"{_CONVERSATION}/items": (response_items.ConversationItems, response_items.InputItems),
    "/v1/batches": (files.BatchRequest, files.Batch),
    "/v1/messages": (anthropic.MessagesRequest, anthropic.MessagesResponse),
    "/v1/messages/count_tokens": (anthropic.CountRequest, anthropic.CountResponse),
    "/tokenize": (tokens.TokenizeRequest, tokens.TokenizeResponse),
    "/detokenize": (tokens.DetokenizeRequest, tokens.DetokenizeResponse),
    "/inference/v1/generate": (GenerateRequest, GenerateResponse),
    "/v1/completions/render": (openai.CompletionRequest, list[GenerateRequest]),
    "/v1/chat/completions/render": (openai.ChatRequest, GenerateRequest),
    "/v1/messages/render": (anthropic.MessagesRequest, GenerateRequest),
    "/infill": (InfillRequest, InfillResponse),
    "/init_weight_transfer_engine": (weights.InitTransferRequest, weights.WeightsMessage),
}
GETS: dict[str, type | None] = {
    "/v1/models": info.ModelList,
    "/v1/models/{model}": info.ModelCard,
    "/health": info.HealthResponse,
    "/ready": info.HealthResponse,
    "/version": info.VersionResponse,
    "/load": info.LoadResponse,
    "/tokenizer_info": tokens.TokenizerInfo,
    "/server_info": info.ServerInfo,
    "/model_info": info.ModelInfo,
    "/metrics": None,
}
_INTEGER, _FLAG, _TEXT = {"type": "integer"}, {"type": "boolean"}, {"type": "string"}
_PAGE: dict[str, Any] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    "order": {"enum": ["asc", "desc"]},
    "after": {"type": "string"},
}
_MODEL: dict[str, Any] = {"model": _TEXT}
_MODE: dict[str, Any] = {"mode": {"enum": ["keep", "wait", "abort"]}, **_MODEL}
# Operations with arguments of the query: method, path, type of the answer, arguments. They work on
# stored objects, or on the weights of a model.
KEPT: tuple[tuple[str, str, type, dict[str, Any]], ...] = (
    (
        "get",
        "/v1/responses/{response_id}",
        response_items.ResponsesResponse,
        {"stream": _FLAG, "starting_after": _INTEGER},
    ),
    ("delete", "/v1/responses/{response_id}", response_items.DeletedResponse, {}),
    ("post", "/v1/responses/{response_id}/cancel", response_items.ResponsesResponse, {}),
    ("get", "/v1/responses/{response_id}/input_items", response_items.InputItems, _PAGE),
    ("get", _CONVERSATION, response_items.ConversationObject, {}),
    ("delete", _CONVERSATION, response_items.DeletedConversation, {}),
    ("get", f"{_CONVERSATION}/items", response_items.InputItems, _PAGE),
    ("get", f"{_CONVERSATION}/items/{{item_id}}", dict[str, Any], {}),
    ("delete", f"{_CONVERSATION}/items/{{item_id}}", response_items.ConversationObject, {}),
    ("post", "/v1/files", files.FileObject, {}),
    ("get", "/v1/files", files.FileList, _PAGE | {"purpose": {"enum": ["batch", "batch_output"]}}),
    ("get", "/v1/files/{file_id}", files.FileObject, {}),
    ("delete", "/v1/files/{file_id}", files.DeletedFile, {}),
    ("get", "/v1/files/{file_id}/content", bytes, {}),
    ("get", "/v1/batches", files.BatchList, _PAGE),
    ("get", "/v1/batches/{batch_id}", files.Batch, {}),
    ("post", "/v1/batches/{batch_id}/cancel", files.Batch, {}),
    ("post", "/pause", weights.EngineStatus, _MODE),
    ("post", "/resume", weights.EngineStatus, _MODEL),
    ("get", "/is_paused", weights.IsPaused, _MODEL),
    ("post", "/sleep", weights.EngineStatus, {"level": {"enum": [1, 2]}, **_MODE}),
    ("post", "/wake_up", weights.EngineStatus, _MODEL),
    ("get", "/is_sleeping", weights.IsSleeping, _MODEL),
    ("get", "/get_world_size", weights.WorldSize, _MODEL),
    ("post", "/start_weight_update", weights.WeightsMessage, {"restart": _FLAG, **_MODEL}),
    ("post", "/update_weights", weights.WeightsMessage, _MODEL),
    (
        "post",
        "/finish_weight_update",
        weights.WeightsMessage,
        {"version": _TEXT, "running": {"enum": ["recompute", "keep", "abort"]}, **_MODEL},
    ),
)
_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {"purpose": {"enum": ["batch"]}, "file": {"type": "string", "format": "binary"}},
}
_BYTES: dict[str, Any] = {"type": "string", "format": "binary"}
# Bodies of operations of KEPT by path: schemas by media type.
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/files": {"multipart/form-data": _FORM},
    "/update_weights": {
        "application/octet-stream": _BYTES,
        "application/json": {
            "type": "object",
            "required": ["model_path"],
            "properties": {"model_path": _TEXT},
        },
    },
}
_REFUSALS = {
    "400": "A field is wrong; `param` names it.",
    "401": "No valid API key.",
    "403": "A Host or Origin that is not served.",
    "404": "No such model or path.",
    "409": "Another update of the weights is in progress, or none.",
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
    """Return the OpenAPI 3.1 document of all endpoints as a JSON object."""
    types = [kind for pair in POSTS.values() for kind in pair]
    types += [kind for kind in GETS.values() if kind is not None]
    types += [answered for _, _, answered, _ in KEPT] + [openai.ErrorResponse]
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    by_type = dict(zip(types, schemas, strict=True))
    refusals = {
        status: _answer(text, by_type[openai.ErrorResponse]) for status, text in _REFUSALS.items()
    }
    paths: dict[str, Any] = {}
    for path, (requested, answered) in POSTS.items():
        good = {"200": _answer("The answer.", by_type[answered])}
        if hasattr(requested, "stream") and not path.endswith("/render"):
            # OpenAPI has no schema for a stream of events.
            good["200"]["content"]["text/event-stream"] = {}
        paths[path] = {"post": _post(path, by_type[requested], good | refusals)}
    for path, answered in GETS.items():
        good: dict[str, Any] = {"description": "Metrics.", "content": {"text/plain": {}}}
        if answered is not None:
            good = _answer("The answer.", by_type[answered])
        paths[path] = {"get": {"operationId": _name(path), "responses": {"200": good, **refusals}}}
    paths["/v1/models/{model}"]["get"]["parameters"] = [_argument("model", {"type": "string"})]
    for operation in KEPT:
        _add_kept(paths, operation, by_type[operation[2]], refusals)
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


def _add_kept(
    paths: dict[str, Any],
    operation: tuple[str, str, type, dict[str, Any]],
    schema: dict[str, Any],
    refusals: dict[str, Any],
) -> None:
    method, path, answered, query = operation
    good = _answer("The answer.", schema)
    if "stream" in query:
        good["content"]["text/event-stream"] = {}
    if answered is bytes:
        good["content"] = {"application/octet-stream": {}}
    parameters = [_argument(name, values, "query") for name, values in query.items()]
    parameters = [*_in_path(path), *parameters]
    described: dict[str, Any] = {
        "operationId": f"{method}_{_name(path)}",
        "parameters": parameters,
        "responses": {"200": good, **refusals},
    }
    if method == "post" and path in _BODIES:
        content = {media: {"schema": form} for media, form in _BODIES[path].items()}
        described["requestBody"] = {"required": True, "content": content}
    paths.setdefault(path, {})[method] = described


def _in_path(path: str) -> list[dict[str, Any]]:
    parts = (part.partition("}") for part in path.split("{")[1:])
    return [_argument(name, {"type": "string"}) for name, _, _ in parts]


def _argument(name: str, schema: dict[str, Any], place: str = "path") -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _post(path: str, schema: dict[str, Any], responses: dict[str, Any]) -> dict[str, Any]:
    return {
        "operationId": _name(path),
        "parameters": _in_path(path),
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
    """Endpoint `GET /openapi.json`: answer with the OpenAPI document of all endpoints."""
    return json_response(document())
