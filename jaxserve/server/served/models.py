"""ServedModel: an engine under its names, and who may still come in."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.engine.async_llm import AsyncLLM
from jaxserve.engine.text.template import TemplateTooLong, weigh
from jaxserve.errors import InvalidRequest, Overloaded, PromptTooLong
from jaxserve.request import Request
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.served.request_metrics import RequestMetrics
from jaxserve.server.settings import ServerConfig
from jaxserve.server.tool_calls.dialect import Dialect
from jaxserve.server.tool_calls.tools import introduce

# Text up to this many characters is tokenized at once; more of it on a thread beside the loop.
INLINE_CHARS = 8192
# A chat template that takes longer goes on there too.
INLINE_SECONDS = 0.02


@dataclass
class Lifecycle:
    """Where the server stands between start and end."""

    is_draining: bool = False


class Admission:
    """Counts what has come in and not ended, and refuses what the queue cannot hold.

    Args:
        num_slots: completions that run at once.
        max_queued: completions that may wait besides.
        max_prompt_tokens: prompt tokens that may wait to be computed.
    """

    def __init__(self, num_slots: int, max_queued: int, max_prompt_tokens: int) -> None:
        self.num_slots = num_slots
        self.max_queued = max_queued
        self.max_prompt_tokens = max_prompt_tokens
        self.num_live = 0
        self.num_refused = 0
        self.num_prompt_tokens = 0

    @property
    def is_full(self) -> bool:
        """Whether not even one more completion would be let in."""
        return self.num_live >= self.num_slots + self.max_queued

    def check(self, completions: int, prompt_tokens: int = 0) -> None:
        """Raises Overloaded where there is no room for so much more now."""
        most = self.num_slots + self.max_queued
        if self.num_live + completions > most:
            self.num_refused += 1
            raise Overloaded(f"{self.num_live} completions are being served or waiting, of {most}")
        # A prompt larger than the bound itself is let in where no other waits.
        waiting = self.num_prompt_tokens
        if waiting and waiting + prompt_tokens > self.max_prompt_tokens:
            self.num_refused += 1
            raise Overloaded(
                f"{waiting} prompt tokens are waiting to be computed, of {self.max_prompt_tokens}"
            )


class ServedModel:
    """One model of the server.

    Args:
        names: that requests may call it by; the first is what answers carry.
        root: where its checkpoint was read from, as it was given.
        llm: serves it.
        config: the server's.
        secret: of this process, from which keys' salts are made.
    """

    def __init__(
        self, names: list[str], root: str, llm: AsyncLLM, config: ServerConfig, secret: bytes
    ) -> None:
        self.names = names
        self.root = root
        self.created = int(time.time())
        self.llm = llm
        self.config = config
        self._secret = secret
        self.observed = RequestMetrics()
        self.active: set[Any] = set()
        engine = llm.thread.engine
        self.limits = engine.limits
        self.default_sampling = engine.loaded.default_sampling
        self.default_max_tokens = engine.loaded.max_new_tokens
        own = engine.config.generation_config in ("auto", "vllm")
        self.most_tokens = None if own else self.default_max_tokens
        self.talk = Dialect(engine.tokenizer, config.tool_call_parser, config.reasoning_parser)
        slots = engine.config.max_num_seqs or 1
        queued, tokens = config.max_num_queued_reqs, config.max_queued_prompt_tokens
        self.admission = Admission(
            slots,
            4 * slots if queued is None else queued,
            64 * (engine.config.max_num_batched_tokens or 1) if tokens is None else tokens,
        )

    @property
    def name(self) -> str:
        return self.names[0]

    def max_tokens(self, asked: int | None) -> int | None:
        """Of an answer, None for as many as the context holds; the rules are vLLM's.

        generation_config.json's max_new_tokens is for requests that ask for nothing; one from a
        folder that --generation-config names limits all requests.
        """
        wanted = self.default_max_tokens if asked is None else asked
        limits = [limit for limit in (wanted, self.most_tokens) if limit is not None]
        return min(limits, default=None)

    def tokenizer(self) -> Any:
        """Raises InvalidRequest where the server takes token ids only."""
        tokenizer = self.llm.get_tokenizer()
        if tokenizer is None:
            raise InvalidRequest(
                "this server has no tokenizer: send token ids to /v1/completions", "prompt"
            )
        return tokenizer

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, without holding up the event loop."""
        if not text:
            raise InvalidRequest("prompt is empty; it needs at least one token", "prompt")
        tokenizer = self.tokenizer()
        encode = tokenizer.encode
        self._check_length(len(text), "prompt")
        if len(text) <= INLINE_CHARS:
            return encode(text, add_special_tokens)
        return await asyncio.to_thread(encode, text, add_special_tokens)

    async def render(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation through the chat template, likewise.

        Tools are described in words where the template does not read them: in a system message, or
        in the user's first where the template takes none.
        """
        tools = options.get("tools")
        if not self.tokenizer().has_template(bool(tools)):
            raise InvalidRequest(
                "this model has no chat template: send a prompt to /v1/completions", "messages"
            )
        if not tools or self.talk.reads_tools:
            return await self._render(messages, options)
        options = {**options, "tools": None}
        try:
            return await self._render(introduce(messages, tools, self.talk.form, "system"), options)
        except TemplateTooLong:
            raise
        except InvalidRequest:
            return await self._render(introduce(messages, tools, self.talk.form, "user"), options)

    async def _render(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
        render = self.tokenizer().render_chat
        characters = sum(len(message["content"]) for message in messages)
        self._check_length(characters, "messages")
        if weigh([messages, options], INLINE_CHARS) <= INLINE_CHARS:
            with suppress(TemplateTooLong):
                return render(messages, seconds=INLINE_SECONDS, **options)
        return await asyncio.to_thread(render, messages, **options)

    def _check_length(self, characters: int, field: str) -> None:
        """Refuse what could not fit if all its tokens were the longest there are."""
        most = self.limits.max_model_len * self.tokenizer().longest_token
        if characters > most:
            raise PromptTooLong(
                f"{field} has {characters} characters, and max_model_len "
                f"({self.limits.max_model_len} tokens) never holds more than {most}",
                field,
            )

    def salted(self, request: Request, api_key: str | None) -> Request:
        """The request with its prefixes kept apart from those of other keys."""
        if api_key is None or self.config.share_prefix_cache:
            return request
        mark = f"{api_key}\0{request.cache_salt}".encode()
        return replace(request, cache_salt=hmac.new(self._secret, mark, "sha256").hexdigest())


class Models:
    """The models of a server, by name.

    Args:
        models: at least one; the first answers requests that name none.
    """

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self.all = list(models)
        self._by_name: Mapping[str, ServedModel] = {
            name: model for model in self.all for name in model.names
        }

    def close(self) -> None:
        """End what is being served, and free the device."""
        for model in self.all:
            model.llm.close()

    def find(self, name: str | None) -> ServedModel:
        """Raises ApiError 404 for a name that is not served."""
        if name is None:
            return self.all[0]
        model = self._by_name.get(name)
        if model is None:
            raise ApiError(
                404, f"The model `{name[:100]}` does not exist.", "model", "model_not_found"
            )
        return model


def prompt_tokens(requests: Iterable[Request]) -> int:
    """Tokens to be computed before every completion of these has its first token."""
    return sum(len(one.prompt_token_ids) * one.sampling.n for one in requests)
