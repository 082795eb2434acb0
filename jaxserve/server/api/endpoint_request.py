"""EndpointRequest: the steps that every endpoint takes before its own work."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Mapping
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
from jaxserve.server.served.notices import Notices
from jaxserve.server.settings import ServerConfig
from jaxserve.settings.compat import check_fields, refuse_unsupported
from jaxserve.text.thinking import ThinkingMarks

T = TypeVar("T", bound=msgspec.Struct)
# Fields that hold a conversation, which clients send again with every request.
_HISTORIES = frozenset(("messages", "input", "items"))
_ID = re.compile(r"[!-~]{1,128}")


def check_operator(request: Request) -> None:
    """Check that the server serves a path that is meant for its operator.

    Raises:
        ApiError: 404, the server has neither keys nor --server-dev-mode, so that everyone who
            reaches it could use the path.
    """
    config: ServerConfig = request.app.state.served.config
    if not (config.server_dev_mode or config.api_key):
        path = request.scope["path"]
        message = f"{path} is not served: it is with --server-dev-mode, or with an --api-key"
        raise ApiError(404, message, code="not_supported")


class EndpointRequest:
    """An HTTP request on its way to the engine.

    Args:
        http_request: as Starlette passes it to an endpoint.

    Attributes:
        models: of the server.
        config: the server's settings.
        notices: of the server's log.
        renamed: the engine's name of a field to the endpoint's, for errors, where they differ.
    """

    def __init__(self, http_request: Request) -> None:
        self._http_request = http_request
        self._served = http_request.app.state.served
        self.models: Models = self._served.models
        self.config: ServerConfig = self._served.config
        self.notices: Notices = self._served.notices
        self.renamed: dict[str, str] = http_request.scope["jaxserve.renamed"]

    @property
    def num_bytes(self) -> int:
        """Size of the body."""
        return len(self._http_request.scope["jaxserve.body"])

    def parse(
        self,
        schema: type[T],
        unsupported: Mapping[str, tuple[Any, ...]] | None = None,
        prepare: Callable[[dict[str, Any]], None] | None = None,
    ) -> T:
        """Return the body as a schema.

        Args:
            schema: a Struct.
            unsupported: fields that only other endpoints serve; see `compat.endpoint_fields`.
            prepare: changes the decoded body before its types are checked.

        Raises:
            ApiError: 400, naming the field.
            InvalidRequest: an unsupported field requests something.
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
        made = to_schema(value, schema)
        if isinstance(made, Sampling):
            self._add_defaults(made)
        return made

    def check_fields(
        self, fields: Mapping[str, Any], served: Collection[str], place: str = ""
    ) -> None:
        """Refuse fields that are not served; refuse unknown ones on a strict server, or log them.

        Args:
            fields: of the body, or of an object in it.
            served: names that may stand there.
            place: the object's field, where there is one.

        Raises:
            ApiError: 400, a field is unknown.
            InvalidRequest: naming a field that requests something.
        """
        unknown = check_fields(fields, served)
        if self.config.strict and unknown:
            names = ", ".join(name[:60] for name in sorted(unknown)[:10])
            param, before = place or min(unknown)[:60], f"{place}: " if place else ""
            raise ApiError(400, f"{before}unknown: {names}", param, "unknown_field")
        self.notices.unknown_fields(f"{place}.{name}" if place else name for name in unknown)

    def _add_defaults(self, body: Sampling) -> None:
        """Add what the server's settings request of every answer."""
        config = self.config
        if config.return_tokens_as_token_ids and body.return_tokens_as_token_ids is None:
            body.return_tokens_as_token_ids = True
        if config.enable_force_include_usage and body.stream:
            body.stream_options = body.stream_options or StreamOptions()
            body.stream_options.include_usage = body.stream_options.continuous_usage_stats = True

    def answer_id(self, kind: str | None, request_id: str | None) -> str:
        """Return the id of an answer, as vLLM's: that of X-Request-Id, of the body, or a new one.

        Args:
            kind: what it begins with; nothing by default.
            request_id: field of the body.

        Raises:
            InvalidRequest: a character that no header could hold, or too many of them.
        """
        if request_id is not None and not _ID.fullmatch(request_id):
            raise InvalidRequest("request_id takes 1 to 128 printable characters", "request_id")
        if self._http_request.headers.get("x-request-id"):
            request_id = self._http_request.scope["jaxserve.request_id"]
        name = request_id or uuid4().hex
        return name if kind is None else f"{kind}-{name}"

    def find_model(self, name: str | None) -> ServedModel:
        """Return the model of a name, the first for None.

        Raises:
            ApiError: 404, the name is not served.
        """
        model = self.models.find(name)
        return model.behind() if self._http_request.scope.get("jaxserve.behind") else model

    def admit(self, model: ServedModel, completions: int) -> None:
        """Check the number of completions before anything is made for each of them.

        Raises:
            ApiError: 503, the server is stopping.
            InvalidRequest: more than a request may have.
            Overloaded: more than the queue holds now.
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
        """Return the engine's request for a prompt, with the priority and salt of the body.

        Raises:
            InvalidRequest: naming the field.
        """
        make = partial(
            model.llm.requests.make,
            prompt,
            sampling,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            thinking=thinking,
        )
        # Making it compiles structured outputs, which takes from milliseconds to a second.
        is_slow = sampling.structured_outputs is not None
        request = await asyncio.to_thread(make) if is_slow else make()
        return model.salted(request, self._http_request.scope["jaxserve.key"])
