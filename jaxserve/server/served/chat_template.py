"""The chat template that a server gives its models, and those that requests bring."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.server.settings import ServerConfig
from jaxserve.text.content_format import WordsLost
from jaxserve.text.messages import RESERVED_INPUTS
from jaxserve.text.named_templates import find_template
from jaxserve.text.template import ChatTemplate
from jaxserve.text.template_budget import TemplateTooLong
from jaxserve.text.tokenizer import Tokenizer

# Of a template that comes with a request; the longest that models have are a third of it.
MAX_REQUEST_CHARS = 1 << 16
# Nodes of its syntax tree; the largest that models have hold a thousand. Compiling takes 0.3 s.
_MAX_REQUEST_NODES = 3000
# CPU time of each conversation that finds the form in which it receives content.
_FORM_SECONDS = 0.05
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


def template_thread() -> Executor:
    """Return the thread that compiles and renders templates of requests, one at a time.

    Each can keep a processor busy for as long as it may; several at once would hold up the event
    loop, and the threads that tokenize long prompts.
    """
    return ThreadPoolExecutor(1, "request-templates")


def with_server_template(tokenizer: Tokenizer, config: ServerConfig) -> Tokenizer:
    """Return a tokenizer with the template that `chat_template` names, if it names one.

    Raises:
        InvalidRequest: the setting has no meaning, or the template shows no user's words.
    """
    template = server_template(config)
    if template is None:
        return tokenizer
    try:
        return tokenizer.with_template(tokenizer.fit(template))
    except (WordsLost, TemplateTooLong) as error:
        raise InvalidRequest(f"chat_template: {error}", "chat_template") from error


class RequestTemplates:
    """Chat templates that requests bring, compiled and rendered beside the event loop.

    Args:
        are_trusted: whether requests may bring any.
        tokenizer: that they are rendered for; None where there is none.
        thread: where that happens.
    """

    def __init__(self, are_trusted: bool, tokenizer: Tokenizer | None, thread: Executor) -> None:
        self._are_trusted = are_trusted
        self._tokenizer = tokenizer
        self._thread = thread
        self._kept: dict[str, ChatTemplate] = {}

    async def run(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return the result of a call that compiles or renders a request's template."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, functools.partial(call, *args, **options))

    def _made(self, source: str) -> ChatTemplate:
        template = find_template(source, may_read=False, max_nodes=_MAX_REQUEST_NODES)
        if self._tokenizer is not None:
            # It may show other inputs alone; and one that does not end is stopped when rendered.
            with suppress(WordsLost, TemplateTooLong):
                self._tokenizer.fit(template, seconds=_FORM_SECONDS)
        return template

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
            template = await self.run(self._made, source)
        self._kept[source] = template
        if len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return template
