"""EndpointRequest: the steps that all endpoints share, from the body to the engine's request.

Notices are log messages about requests, each of which is logged only once.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import msgspec
from starlette.requests import Request

from jaxserve.errors import InvalidRequest
from jaxserve.request import Request as EngineRequest
from jaxserve.request import SamplingParams
from jaxserve.server.schema.decode import parse_json, to_schema, without_half_pairs
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.openai import Sampling, StreamOptions
from jaxserve.server.served.models import Models, ServedModel
from jaxserve.server.settings import ServerConfig
from jaxserve.settings.compat import check_fields, refuse_unsupported
from jaxserve.text.thinking import ThinkingMarks

T = TypeVar("T", bound=msgspec.Struct)
# Fields that hold a conversation, which clients send again with every request.
_HISTORIES = frozenset(("messages", "input", "items"))
_ID = re.compile(r"[!-~]{1,128}")


def check_operator(request: Request) -> None:
    """Check that a path for the server's operator is open on this server.

    Args:
        request: the HTTP request to the path.

    Raises:
        ApiError: 404, the server has neither an API key nor --server-dev-mode, so that any client
            could use the path.
    """
    config: ServerConfig = request.app.state.served.config
    if not (config.server_dev_mode or config.api_key):
        path = request.scope["path"]
        message = f"{path} is not served: it is with --server-dev-mode, or with an --api-key"
        raise ApiError(404, message, code="not_supported")


class EndpointRequest:
    """An HTTP request to an endpoint, with the steps from its body to the engine's requests.

    `renamed` maps the engine's field names to the endpoint's names, for error messages.
    """

    def __init__(self, http_request: Request) -> None:
        self._http_request = http_request
        self._served = http_request.app.state.served
        self.models: Models = self._served.models  # the served models
        self.config: ServerConfig = self._served.config
        self.notices: Notices = self._served.notices
        # Maps the engine's field names to names of the endpoint, for error messages.
        self.renamed: dict[str, str] = http_request.scope["jaxserve.renamed"]

    @property
    def num_bytes(self) -> int:
        """Size of the request's body in bytes."""
        return len(self._http_request.scope["jaxserve.body"])

    def parse(
        self,
        schema: type[T],
        unsupported: Mapping[str, tuple[Any, ...]] | None = None,
        prepare: Callable[[dict[str, Any]], None] | None = None,
    ) -> T:
        """Decode the request's JSON body, and return it as an instance of a Struct.

        Unknown fields are logged, or refused with `strict`. Server settings fill unset fields.

        Args:
            schema: the Struct type.
            unsupported: fields that only other endpoints serve, with their neutral values, from
                `compat.endpoint_fields`.
            prepare: called with the decoded body, which it may change, before types are checked.

        Raises:
            ApiError: 400, the JSON is malformed, or the field that the error names has a wrong
                type.
            InvalidRequest: an unsupported field has a value that is not neutral.
        """
        config = self.config
        body: bytes = self._http_request.scope["jaxserve.body"]
        limits = (config.max_json_depth, config.max_json_nodes)
        try:
            value: Any = parse_json(body, *limits)
        except ApiError as error:
            fields: tuple[str, ...] = getattr(schema, "__struct_fields__", ())
            has_history = not _HISTORIES.isdisjoint(fields) and error.code == "invalid_json"
            mended = without_half_pairs(body) if has_history else body
            if mended == body:
                raise
            value = parse_json(mended, *limits)
        if not isinstance(value, dict):
            raise ApiError(400, "the body must be a JSON object", code="invalid_type")
        refuse_unsupported(value, unsupported or {}, " by this server")
        self.check_fields(value, (*schema.__struct_encode_fields__, *(unsupported or ())))
        if prepare is not None:
            prepare(value)
        parsed = to_schema(value, schema)
        if isinstance(parsed, Sampling):
            self._add_defaults(parsed)
        return parsed

    def check_fields(
        self, fields: Mapping[str, Any], served: Collection[str], place: str = ""
    ) -> None:
        """Refuse unsupported fields of a JSON object, and log or refuse its unknown fields.

        Unknown fields are refused with the setting `strict`.

        Args:
            fields: values of the object by name.
            served: names of the supported fields.
            place: name of the body's field that holds the object, "" for the body itself.

        Raises:
            ApiError: 400, a field is unknown.
            InvalidRequest: an unsupported field has a value that is not neutral.
        """
        unknown = check_fields(fields, served)
        if self.config.strict and unknown:
            names = ", ".join(name[:60] for name in sorted(unknown)[:10])
            param, before = place or min(unknown)[:60], f"{place}: " if place else ""
            raise ApiError(400, f"{before}unknown: {names}", param, "unknown_field")
        self.notices.unknown_fields(f"{place}.{name}" if place else name for name in unknown)

    def _add_defaults(self, body: Sampling) -> None:
        config = self.config
        if config.return_tokens_as_token_ids and body.return_tokens_as_token_ids is None:
            body.return_tokens_as_token_ids = True
        if config.enable_force_include_usage and body.stream:
            body.stream_options = body.stream_options or StreamOptions()
            body.stream_options.include_usage = body.stream_options.continuous_usage_stats = True

    def answer_id(self, kind: str | None, request_id: str | None) -> str:
        """Return the id of an answer: the header X-Request-Id, the body's request_id, or a new id.

        Args:
            kind: prefix of the id, such as "cmpl", or None.
            request_id: the body's request_id, or None.

        Raises:
            InvalidRequest: request_id is too long, or has characters that a header cannot hold.
        """
        if request_id is not None and not _ID.fullmatch(request_id):
            raise InvalidRequest("request_id takes 1 to 128 printable characters", "request_id")
        if self._http_request.headers.get("x-request-id"):
            request_id = self._http_request.scope["jaxserve.request_id"]
        name = request_id or uuid4().hex
        return name if kind is None else f"{kind}-{name}"

    def find_model(self, name: str | None) -> ServedModel:
        """Return the served model with this name, or the first model for None.

        A request of a batch gets the model's form with low priority.

        Raises:
            ApiError: 404, no model has this name.
        """
        model = self.models.find(name)
        return model.behind() if self._http_request.scope.get("jaxserve.behind") else model

    def admit(self, model: ServedModel, completions: int) -> None:
        """Check that the request can be admitted now with this number of completions.

        Raises:
            ApiError: 503, the server is stopping.
            InvalidRequest: there are more completions than a request may have.
            Overloaded: the model's queue has no room for them.
        """
        if self._served.lifecycle.is_draining:
            raise ApiError(503, "the server is stopping", code="shutting_down")
        most = self.config.max_prompts
        if completions > most:
            raise InvalidRequest(
                f"prompts times n must be at most {most}, got {completions}", "prompt"
            )
        model.admission.check(completions)

    async def engine_request(
        self,
        model: ServedModel,
        prompt: list[int],
        sampling: SamplingParams,
        body: Sampling,
        thinking: ThinkingMarks | None = None,
    ) -> EngineRequest:
        """Return the engine's request for a prompt, checked against the engine's limits.

        Args:
            prompt: token ids of the prompt.
            sampling: sampling parameters of the request.
            body: body of the HTTP request, for its priority and cache salt.
            thinking: tokens that mark the model's reasoning, or None.

        Raises:
            InvalidRequest: a field is wrong, which the error names.
        """
        make = partial(
            model.llm.requests.make,
            prompt,
            sampling,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            thinking=thinking,
        )
        # Structured outputs are compiled, which takes from milliseconds to a second.
        is_slow = sampling.structured_outputs is not None
        request = await asyncio.to_thread(make) if is_slow else make()
        return model.salted(request, self._http_request.scope["jaxserve.key"])


MAX_NAMES, MAX_NAME_CHARS = 100, 60
# Tells the log's rate limit that the number of these records is already limited.
_BOUNDED = {"is_bounded": True}

_log = logging.getLogger(__name__)


class Notices:
    """Log of warnings about requests, each of which is written once.

    Clients choose field names, so names are shortened, escaped and limited in number.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._messages: set[str] = set()

    def unknown_fields(self, names: Iterable[str]) -> None:
        """Log the names of unknown request fields, which the server ignores, each name once."""
        fresh: list[str] = []
        for name in names:
            if len(self._names) == MAX_NAMES:
                break
            shown = f"'{ascii(name[:MAX_NAME_CHARS])[1:-1][:MAX_NAME_CHARS]}'"
            if shown not in self._names:
                self._names.add(shown)
                fresh.append(shown)
        if not fresh:
            return
        more = ""
        if len(self._names) == MAX_NAMES:
            more = f"; {MAX_NAMES} names were logged by now, and further ones are not"
        _log.warning("unknown fields are ignored: %s%s", ", ".join(fresh), more, extra=_BOUNDED)

    def once(self, message: str) -> None:
        """Log a warning, unless it was logged before."""
        if message not in self._messages:
            self._messages.add(message)
            _log.warning("%s", message, extra=_BOUNDED)
