"""Endpoint POST /v1/chat/completions/batch: vLLM's, conversations answered side by side."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequest
from jaxserve.server.api.chat import answer_chats
from jaxserve.server.api.endpoint_request import EndpointRequest
from jaxserve.server.schema.openai import BatchChatRequest, ChatRequest
from jaxserve.server.schema.sampling import NO_FUNCTIONS, NO_SUFFIX

# Fields of one conversation alone, with their neutral values.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **NO_FUNCTIONS,
    **NO_SUFFIX,
    "stream": (None, False),
    "n": (None, 1),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "prompt_logprobs": (None,),
    "return_prompt_text": (None, False),
}


async def batch_chat_completions(http_request: Request) -> Response:
    """Answer each of several conversations once; the choices stand in their order.

    Raises:
        ApiError, InvalidRequest, Overloaded: see `EndpointRequest.parse` and `prepare`.
    """
    request = EndpointRequest(http_request)
    request.renamed |= {"prompt": "messages", "logprobs": "top_logprobs"}
    body = request.parse(BatchChatRequest, UNSUPPORTED)
    conversations = body.messages
    if not conversations or not all(conversations):
        raise InvalidRequest("messages must hold conversations, none of them empty", "messages")
    fields: dict[str, Any] = msgspec.structs.asdict(body) | {"messages": conversations[0]}
    chat = ChatRequest(**fields)
    return await answer_chats(http_request, request, chat, conversations)
