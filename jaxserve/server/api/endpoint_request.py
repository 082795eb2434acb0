"""Call: what every endpoint does with a request before its own work."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from jaxserve.engine.text.thinking import ThinkingMarks
from jaxserve.errors import InvalidRequest
from jaxserve.request import Request as EngineRequest
from jaxserve.request import SamplingParams
from jaxserve.server.schema.decode import parse_json, to_schema, unknown_fields
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.openai import Sampling
from jaxserve.server.schema.sampling import UNSUPPORTED, refuse_unserved
from jaxserve.server.served.models import Models, ServedModel
from jaxserve.server.settings import ServerConfig

T = TypeVar("T")


class EndpointRequest:
    """One request on its way in.

    Attributes:
        renamed: fields that errors must call by another name, where an endpoint's differ from
            the engine's.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._served = request.app.state.served
        self.models: Models = self._served.models
        self.config: ServerConfig = self._served.config
        self.renamed: dict[str, str] = request.scope["jaxserve.renamed"]

    def parse(self, schema: type[T], not_yet: Mapping[str, tuple[Any, ...]] | None = None) -> T:
        """The body as a schema.

        Args:
            schema: a Struct.
            not_yet: an endpoint's own unserved fields, as `fields.UNSUPPORTED`.

        Raises:
            ApiError: 400, naming the field.
        """
        config = self.config
        body: bytes = self._request.scope["jaxserve.body"]
        value: Any = parse_json(body, config.max_json_depth, config.max_json_nodes)
        if not isinstance(value, dict):
            raise ApiError(400, "the body must be a JSON object", code="invalid_type")
        refuse_unserved(value, UNSUPPORTED | dict(not_yet or {}))
        if config.strict:
            unknown = unknown_fields(value, schema)  # type: ignore[arg-type]
            if unknown:
                names = ", ".join(name[:60] for name in unknown[:10])
                raise ApiError(400, f"unknown: {names}", unknown[0][:60], "unknown_field")
        return to_schema(value, schema)

    def find_model(self, name: str | None) -> ServedModel:
        """Raises ApiError 404 for a model that is not served."""
        return self.models.find(name)

    def admit(self, model: ServedModel, completions: int) -> None:
        """Count completions before anything is made for each of them.

        Raises:
            InvalidRequest: more than one request may ask for.
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

    async def request(
        self,
        model: ServedModel,
        prompt: list[int],
        sampling: SamplingParams,
        body: Sampling,
        thinking: ThinkingMarks | None = None,
    ) -> EngineRequest:
        """Have the engine check one prompt.

        Raises:
            InvalidRequest: naming the field.
        """
        check = partial(
            model.llm.request,
            prompt,
            sampling,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            thinking=thinking,
        )
        # A form is compiled with the check, which takes from milliseconds to a second.
        form = sampling.structured_outputs
        request = check() if form is None else await asyncio.to_thread(check)
        return model.salted(request, self._request.scope["jaxserve.key"])
