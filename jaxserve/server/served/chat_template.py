"""Chat templates from the server's settings and from requests."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.server.settings import ServerConfig
from jaxserve.text.messages import RESERVED_INPUTS, WordsLost
from jaxserve.text.template import ChatTemplate, find_template
from jaxserve.text.template_budget import TemplateTooLong
from jaxserve.text.tokenizer import Tokenizer

# Maximum length of a template in a request. The longest published templates have a third of it.
MAX_REQUEST_CHARS = 1 << 16
# Maximum nodes in its syntax tree, which compile in 0.3 s. Published templates have up to 1000.
_MAX_REQUEST_NODES = 3000
# CPU time of each test conversation that detects the template's form of content.
_FORM_SECONDS = 0.05
# Size of the cache of compiled templates. Clients repeat them.
_KEPT = 8


def check_inputs(inputs: Mapping[str, Any], field: str) -> None:
    """Check that no name of chat template inputs is reserved for the server.

    Args:
        inputs: values of inputs by name, from a setting or a request.
        field: name of the setting or request field, for the message.

    Raises:
        InvalidRequest: a name is reserved. The message names `field`.
    """
    for name in inputs:
        if name in RESERVED_INPUTS:
            raise InvalidRequest(f"{field} may not hold {name[:60]!r}", field)


def server_template(config: ServerConfig) -> ChatTemplate | None:
    """Return the compiled chat template of the setting `chat_template`, or None if it is unset.

    The names in `default_chat_template_kwargs` are checked too.

    Raises:
        InvalidRequest: the template is invalid, or a name is reserved. The message names the
            setting.
    """
    check_inputs(config.default_chat_template_kwargs or {}, "default_chat_template_kwargs")
    return None if config.chat_template is None else find_template(config.chat_template)


def template_thread() -> Executor:
    """Return a single-threaded executor, which compiles and renders chat templates of requests.

    A template can keep a processor busy for as long as its limit allows. Several at once would
    delay the event loop and the threads that tokenize long prompts.
    """
    return ThreadPoolExecutor(1, "request-templates")


def with_server_template(tokenizer: Tokenizer, config: ServerConfig) -> Tokenizer:
    """Return a copy of a tokenizer with the chat template of the setting `chat_template`.

    Without the setting, return the tokenizer itself.

    Raises:
        InvalidRequest: the setting is invalid, or the template does not show user messages or does
            not end.
    """
    template = server_template(config)
    if template is None:
        return tokenizer
    try:
        return tokenizer.with_template(tokenizer.fit(template))
    except (WordsLost, TemplateTooLong) as error:
        raise InvalidRequest(f"chat_template: {error}", "chat_template") from error


class RequestTemplates:
    """Chat templates that requests contain, compiled and rendered on an executor.

    The last compiled templates are cached.

    Args:
        are_trusted: whether requests may contain templates.
        tokenizer: the model's tokenizer, or None. It detects a template's form of content.
        thread: the executor.
    """

    def __init__(self, are_trusted: bool, tokenizer: Tokenizer | None, thread: Executor) -> None:
        self._are_trusted = are_trusted
        self._tokenizer = tokenizer
        self._thread = thread
        self._kept: dict[str, ChatTemplate] = {}

    async def run(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run a function with arguments on the executor, and return its result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, functools.partial(call, *args, **options))

    def _made(self, source: str) -> ChatTemplate:
        template = find_template(source, may_read=False, max_nodes=_MAX_REQUEST_NODES)
        if self._tokenizer is not None:
            # It may show only other inputs. A template that does not end is stopped when rendered.
            with suppress(WordsLost, TemplateTooLong):
                self._tokenizer.fit(template, seconds=_FORM_SECONDS)
        return template

    async def get(self, source: str) -> ChatTemplate:
        """Return the compiled form of a request's chat template.

        Args:
            source: Jinja source of the template, or the name of a shipped one.

        Raises:
            InvalidRequest: requests may not contain templates, or the template is too long or
                invalid.
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
