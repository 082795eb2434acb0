"""Endpoints POST /tokenize and /detokenize, and GET /tokenizer_info."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.engine.prompts import check_token_ids
from jaxserve.errors import InvalidRequest
from jaxserve.server.api.conversations import as_tools, template_ids
from jaxserve.server.api.endpoint_request import EndpointRequest
from jaxserve.server.api.streaming import json_response
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.openai import ChatMessage, ChatRequest, Tool


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize: either a prompt, or messages with inputs of the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    documents: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct):
    """Answer of POST /tokenize: token ids, their number, and if requested their texts."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize: token ids, and the name of the model."""

    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct):
    """Answer of POST /detokenize: the text of the token ids."""

    prompt: str


class TokenizerInfo(msgspec.Struct):
    """Answer of GET /tokenizer_info: special tokens and chat template, in vLLM's form."""

    tokenizer_class: str
    model_max_length: int
    added_tokens_decoder: dict[str, str] = {}
    special_tokens_map: dict[str, str] = {}
    chat_template: str | None = None


async def tokenize(http_request: Request) -> Response:
    """Endpoint `POST /tokenize`: answer with the token ids of a prompt or of rendered messages.

    Messages are rendered by the chat template.

    Raises:
        InvalidRequest: the request has both a prompt and messages, or neither.
    """
    request = EndpointRequest(http_request)
    body = request.parse(TokenizeRequest)
    model = request.find_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", "prompt")
    if body.messages is not None:
        chat = ChatRequest(
            messages=body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template=body.chat_template,
            chat_template_kwargs=body.chat_template_kwargs,
            enable_thinking=body.enable_thinking,
            documents=body.documents,
            tools=body.tools,
        )
        ids = await template_ids(as_tools(chat), model)
    else:
        ids = await model.encode(body.prompt or "", body.add_special_tokens is not False)
    response = TokenizeResponse(len(ids), model.limits.max_model_len, ids)
    if body.return_token_strs:
        response.token_strs = model.tokenizer().token_strings(ids)
    return json_response(response)


async def tokenizer_info(http_request: Request) -> Response:
    """Endpoint `GET /tokenizer_info`: answer with a tokenizer's special tokens and chat template.

    The model is the first one, or the one of `?model=`. The form is vLLM's.

    Raises:
        ApiError: 404, the server does not show them, or there is no such model.
        InvalidRequest: the server has no tokenizer.
    """
    request = EndpointRequest(http_request)
    if not request.config.enable_tokenizer_info_endpoint:
        raise ApiError(
            404,
            "/tokenizer_info is not served: start the server with --enable-tokenizer-info-endpoint",
            code="not_supported",
        )
    model = request.find_model(http_request.query_params.get("model"))
    tokenizer = model.tokenizer()
    added = tokenizer.backend.get_added_tokens_decoder()
    info = TokenizerInfo("PreTrainedTokenizerFast", model.limits.max_model_len)
    info.added_tokens_decoder = {str(number): token.content for number, token in added.items()}
    info.special_tokens_map = tokenizer.special_names
    info.chat_template = tokenizer.template_source or None
    return json_response(info)


async def detokenize(http_request: Request) -> Response:
    """Endpoint `POST /detokenize`: answer with the text of token ids, special tokens included.

    Raises:
        InvalidRequest: a number is not a token id of the model.
    """
    request = EndpointRequest(http_request)
    request.renamed["prompt"] = "tokens"
    body = request.parse(DetokenizeRequest)
    model = request.find_model(body.model)
    tokenizer = model.tokenizer()
    ids = check_token_ids(body.tokens, model.limits.vocab_size).tolist() if body.tokens else []
    return json_response(DetokenizeResponse(await asyncio.to_thread(tokenizer.decode, ids, False)))
