"""ServedModel: an engine with its names, and the functions that turn requests into token ids."""

from __future__ import annotations

import asyncio
import copy
import hmac
import time
from collections.abc import Iterable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from jaxserve.engine.async_llm import AsyncLLM
from jaxserve.errors import InvalidRequest, PromptTooLong
from jaxserve.request import Request
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.sampling import NO_BOUND
from jaxserve.server.served import chat_template
from jaxserve.server.served.admission import Admission, make_admission
from jaxserve.server.served.request_metrics import RequestMetrics
from jaxserve.server.served.weight_update import WeightUpdate
from jaxserve.server.settings import ServerConfig
from jaxserve.server.tool_calls import histories
from jaxserve.server.tool_calls.dialect import Dialect
from jaxserve.server.tool_calls.introductions import introduce
from jaxserve.text import HOW_TO_GIVE
from jaxserve.text.generation_config import chat_sampling
from jaxserve.text.grammars import schema_problem
from jaxserve.text.json_schemas import EnforceableSchemas
from jaxserve.text.messages import RefusedMessages
from jaxserve.text.template_budget import TemplateTooLong, weigh
from jaxserve.text.tokenizer import NO_TEMPLATE

# Texts up to this length are tokenized on the event loop, longer texts on another thread.
INLINE_CHARS = 8192
# Settings of low-priority requests, which the limits of queue and time do not apply to.
NO_LIMIT, NO_SECONDS, LAST_PRIORITY = 2**31 - 1, 1e9, 2**31 - 1
# A chat template that takes longer than this is rendered again on another thread.
INLINE_SECONDS = 0.02


class ServedModel:
    """A model of the server: its engine, names, tokenizer, chat template and limits.

    Args:
        names: names of the model in requests. Answers contain the first.
        root: source of its checkpoint, as the user gave it.
        llm: the started engine.
        config: the server's settings.
        secret: secret of this process or its fleet, from which salts of API keys are derived.
        thread: executor for chat templates of requests, shared by the models of a server.

    Raises:
        InvalidRequest: a setting of the chat template is invalid.
    """

    def __init__(
        self,
        names: list[str],
        root: str,
        llm: AsyncLLM,
        config: ServerConfig,
        secret: bytes,
        thread: Executor | None = None,
    ) -> None:
        self.names = names
        self.root = root
        self.created = int(time.time())
        self.llm = llm
        self.config = config
        self._secret = secret
        self.limits = llm.limits
        self.weight_update = WeightUpdate(llm)
        self.request_metrics = RequestMetrics(llm.limits.max_model_len)
        self.active: set[Any] = set()
        self.default_sampling = llm.get_default_sampling_params()
        # Sampling settings of the page, if the checkpoint recommends none.
        self.chat_sampling = chat_sampling(llm.recommends_sampling, llm.config)
        self.default_max_tokens = llm.max_new_tokens
        is_own_config = llm.config.generation_config in ("auto", "vllm")
        # Maximum length of any answer, None for the limit of the context.
        self.most_tokens = None if is_own_config else self.default_max_tokens
        tokenizer = llm.get_tokenizer()
        if tokenizer is not None:
            tokenizer = chat_template.with_server_template(tokenizer, config)
        self._tokenizer = tokenizer
        self.request_templates = chat_template.RequestTemplates(
            config.trust_request_chat_template, tokenizer, thread or chat_template.template_thread()
        )
        # Formats of its calls and thoughts.
        self.dialect = Dialect(tokenizer, config.tool_call_parser, config.reasoning_parser)
        # Cache of schemas of tools, in enforceable form.
        self.schemas = EnforceableSchemas(schema_problem)
        self._text_printers: dict[bool, bool] = {}  # key: with tools or without
        self.admission = make_admission(llm.config, config)
        self.tracer: Any = None  # `tracing.RequestTracer` of its requests, or None
        self._behind: ServedModel | None = None
        self._is_behind = False

    @property
    def name(self) -> str:
        """First name of the model, which answers contain."""
        return self.names[0]

    def behind(self) -> ServedModel:
        """Return a copy of this model for low-priority requests, such as the lines of batches.

        Its requests do not count in the queue of other requests, have no deadline, and have the
        last priority. Later calls return the same copy.
        """
        if self._behind is None:
            last = self._behind = copy.copy(self)
            last.admission = Admission(self.admission.num_slots, NO_LIMIT, NO_LIMIT)
            last.config = replace(self.config, queue_timeout=NO_SECONDS, request_timeout=NO_SECONDS)
            last._is_behind = True
        return self._behind

    def max_tokens(self, requested: int | None) -> int | None:
        """Return the maximum number of tokens of an answer, or None for the limit of the context.

        The rules are vLLM's: max_new_tokens in the checkpoint's own generation_config.json applies
        to requests without a limit. The file in a folder named by --generation-config limits all
        requests.

        Args:
            requested: limit of the request, None if it sets no limit, or NO_BOUND for the limit of
                the context.

        Raises:
            InvalidRequest: the request asks for less than one token.
        """
        limit = self.default_max_tokens if requested is None else requested
        if requested == NO_BOUND:
            limit = None
        elif requested is not None and requested < 1:
            message = f"max_tokens must be at least 1, or -1 for no bound, got {requested}"
            raise InvalidRequest(message, "max_tokens")
        limits = [most for most in (limit, self.most_tokens) if most is not None]
        return min(limits, default=None)

    def tokenizer(self) -> Any:
        """Return the model's tokenizer.

        Raises:
            InvalidRequest: the model has no tokenizer, so the server accepts only token ids.
        """
        if self._tokenizer is None:
            raise InvalidRequest(
                "this server has no tokenizer: send token ids to /v1/completions", "prompt"
            )
        return self._tokenizer

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text prompt. Long texts are tokenized on another thread.

        The number of tokens is not checked.

        Args:
            add_special_tokens: whether to add tokens such as the beginning-of-sequence token.

        Raises:
            InvalidRequest: the text is empty, or the model has no tokenizer.
            PromptTooLong: the text has more characters than any max_model_len tokens.
        """
        if not text:
            raise InvalidRequest("prompt is empty; it needs at least one token", "prompt")
        encode = self.tokenizer().encode
        self.check_length(len(text), "prompt")
        if len(text) <= INLINE_CHARS:
            return encode(text, add_special_tokens)
        return await asyncio.to_thread(encode, text, add_special_tokens)

    async def render(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Return the token ids of a conversation, rendered by the chat template.

        If the template does not read tools, they are described in words, in a system message, or in
        the first user message if the template refuses system messages. If the template refuses the
        conversation, simplified forms of the conversation are tried.

        Args:
            messages: messages with `role`, `content` and so on, as the template reads them.
            options: inputs of the template by name, such as `tools`, or a compiled template
                `chat_template` to use instead of the model's.

        Raises:
            InvalidRequest: there is no template, it refuses the messages, or it does not read
                documents.
            PromptTooLong: the messages have more characters than any max_model_len tokens.
        """
        template = options.get("chat_template")
        if template is None and not self.tokenizer().has_template(bool(options.get("tools"))):
            raise InvalidRequest(
                f"{NO_TEMPLATE}: send a prompt to /v1/completions, or start the server with "
                f"--chat-template and {HOW_TO_GIVE}",
                "messages",
            )
        reads = self.tokenizer().template_reads if template is None else template.reads
        if options.get("documents") and not reads("documents"):
            raise InvalidRequest(
                "the chat template reads no documents: put them into a message", "documents"
            )
        if histories.has_text_arguments(messages) and not await self._prints_text(options):
            messages = histories.with_objects(messages)
        try:
            return await self.render_as_it_is(messages, options)
        except RefusedMessages as error:
            source = self.tokenizer().template_source if template is None else template.source
            forms = histories.plainer_histories(messages, "tool_calls" in source)
            # A template of a request may take a second of CPU time for each attempt.
            for plainer in forms if template is None else forms[-2:]:
                with suppress(RefusedMessages):
                    return await self.render_as_it_is(plainer, options)
            raise error

    async def _prints_text(self, options: dict[str, Any]) -> bool:
        """Return whether the chat template prints tool-call arguments unchanged if they are text.

        A test conversation is rendered to find out. The result for the model's own template is
        cached.

        Args:
            options: options of `render`, of which the template and the presence of tools are used.
        """
        template, with_tools = options.get("chat_template"), bool(options.get("tools"))
        if template is None and with_tools in self._text_printers:
            return self._text_printers[with_tools]
        inputs = {} if template is None else {"chat_template": template}
        if with_tools:  # the request's own tools may be refused
            inputs["tools"] = histories.PROBE_TOOLS
        prints_text = False
        with suppress(InvalidRequest):
            ids = await self.render_as_it_is(histories.probe_messages(), inputs)
            prints_text = histories.PROBE in self.tokenizer().decode(ids, False)
        if template is None:
            self._text_printers[with_tools] = prints_text
        return prints_text

    async def render_as_it_is(
        self, messages: list[dict[str, Any]], options: dict[str, Any]
    ) -> list[int]:
        """Return the token ids of a conversation, rendered without trying simplified forms.

        The arguments, and the description of tools in words, are those of `render`.

        Raises:
            InvalidRequest: see `render`.
        """
        template, tools = options.get("chat_template"), options.get("tools")
        if template is None:
            messages, tools = self.dialect.adapted(messages, tools)
            options = {**options, "tools": tools}
        if not tools or (self.dialect.reads_tools if template is None else template.reads("tools")):
            return await self._render(messages, options)
        options, form = {**options, "tools": None}, self.dialect.call_format
        try:
            return await self._render(introduce(messages, tools, form, "system"), options)
        except TemplateTooLong:
            raise
        except InvalidRequest:
            return await self._render(introduce(messages, tools, form, "user"), options)

    async def _render(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
        render = self.tokenizer().render_chat
        self.check_length(sum(len(message["content"] or "") for message in messages), "messages")
        inputs = {name: value for name, value in options.items() if name != "chat_template"}
        if len(inputs) < len(options):  # the request has a template
            return await self.request_templates.run(render, messages, **options)
        if weigh([messages, inputs], INLINE_CHARS) <= INLINE_CHARS:
            with suppress(TemplateTooLong):
                return render(messages, seconds=INLINE_SECONDS, **options)
        return await asyncio.to_thread(render, messages, **options)

    def check_length(self, characters: int, field: str) -> None:
        """Check that a text of `characters` could fit into the context with the longest tokens.

        Raises:
            PromptTooLong: the text cannot fit. The message names `field`, the text's request field.
        """
        most = self.limits.max_model_len * self.tokenizer().longest_token
        if characters > most:
            raise PromptTooLong(
                f"{field} has {characters} characters, and max_model_len "
                f"({self.limits.max_model_len} tokens) never holds more than {most}",
                field,
            )

    def salted(self, request: Request, api_key: str | None) -> Request:
        """Return an engine request with a cache salt that depends on the client's API key.

        Requests of different keys then do not share prefixes in the prefix cache. The salt is
        unchanged if `api_key` is None or with `share_prefix_cache`. A low-priority model also sets
        the last priority.
        """
        if self._is_behind:
            request = replace(request, priority=LAST_PRIORITY)
        if api_key is None or self.config.share_prefix_cache:
            return request
        mark = f"{api_key}\0{request.cache_salt}".encode()
        return replace(request, cache_salt=hmac.new(self._secret, mark, "sha256").hexdigest())


class Models:
    """The models of a server, found by name.

    Args:
        models: at least one. The first answers requests without a model name.
    """

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self.all = list(models)
        self._by_name = {name: model for model in self.all for name in model.names}

    def close(self) -> None:
        """Stop the engines of all served models. This ends their requests and frees devices."""
        for model in self.all:
            model.llm.close()

    def find(self, name: str | None) -> ServedModel:
        """Return the served model with this name. None means the first model.

        Raises:
            ApiError: 404, no model has this name.
        """
        if name is None:
            return self.all[0]
        if name not in self._by_name:
            message = f"The model `{name[:100]}` does not exist."
            raise ApiError(404, message, "model", "model_not_found")
        return self._by_name[name]
