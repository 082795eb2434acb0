"""The chat template that a server gives its models, and those that requests bring."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from jaxserve.engine.text.messages import RESERVED_INPUTS
from jaxserve.engine.text.named_templates import find_template
from jaxserve.engine.text.template import ChatTemplate
from jaxserve.errors import InvalidRequest
from jaxserve.server.settings import ServerConfig

# Of a template that comes with a request; the longest that models have are a third of it.
MAX_REQUEST_CHARS = 1 << 16
# Compiled templates of requests that are kept: clients send the same ones again.
_KEPT = 8


def check_inputs(inputs: Mapping[str, Any], field: str) -> None:
    """Check inputs of a chat template that a setting or a request gives.

    Raises:
        InvalidRequest: naming the field, where one has a name that is not free.
    """
    for name in inputs:
        if name in RESERVED_INPUTS:
            raise InvalidRequest(f"{field} may not hold {name[:60]!r}", field)


def server_template(config: ServerConfig) -> ChatTemplate | None:
    """Return the template that `chat_template` names; None where it names none.

    Raises:
        InvalidRequest: naming the setting that has no meaning.
    """
    check_inputs(config.default_chat_template_kwargs or {}, "default_chat_template_kwargs")
    return None if config.chat_template is None else find_template(config.chat_template)


class RequestTemplates:
    """Chat templates that requests bring, compiled beside the event loop.

    Args:
        are_trusted: whether requests may bring any.
    """

    def __init__(self, are_trusted: bool) -> None:
        self._are_trusted = are_trusted
        self._kept: dict[str, ChatTemplate] = {}

    async def get(self, source: str) -> ChatTemplate:
        """Return a request's template, compiled.

        Raises:
            InvalidRequest: requests may bring none, or it has no meaning.
        """
        if not self._are_trusted:
            raise InvalidRequest(
                "chat_template is taken from requests only where the server was started with "
                "--trust-request-chat-template",
                "chat_template",
            )
        if len(source) > MAX_REQUEST_CHARS:
            raise InvalidRequest(
                f"chat_template has {len(source)} characters; at most {MAX_REQUEST_CHARS} are read",
                "chat_template",
            )
        template = self._kept.pop(source, None)
        if template is None:
            template = await asyncio.to_thread(find_template, source, False)
        self._kept[source] = template
        if len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return template
