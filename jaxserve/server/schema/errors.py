"""ApiError: an error answer, and the conversion of exceptions to it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import (
    EngineAsleep,
    EngineClosed,
    EngineDead,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
)

MAX_MESSAGE_CHARS = 600
# OpenAI's error types by status, with the names that Anthropic's client needs.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """Error response of the HTTP API: the status code, and the fields of the body.

    Args:
        status: HTTP status code.
        message: error and allowed values, cut to `MAX_MESSAGE_CHARS`.
        param: request field that caused the error, or None.
        code: machine-readable name of the error.
        headers: additional HTTP headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[: MAX_MESSAGE_CHARS - 3] + "..."
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return the body of the error response as a dict, in OpenAI's form.

        The `type` beside the error object is for Anthropic's client.
        """
        return {
            "type": "error",
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            },
        }


def too_busy(message: str, code: str, seconds: float) -> ApiError:
    """Return an error response with status 429, which tells the client to retry after `seconds`."""
    return ApiError(429, message, code=code, headers={"retry-after": str(max(1, round(seconds)))})


def too_many_connections() -> ApiError:
    """Return an error response with status 503, for a connection beyond the limit on
    connections.
    """
    return ApiError(503, "too many connections", code="too_many_connections")


def as_api_error(error: Exception, renamed: Mapping[str, str] | None = None) -> ApiError:
    """Convert an exception to the error response for the client, without internals of the server.

    An unknown exception becomes status 500 with the message "internal error".

    Args:
        renamed: names of request fields in the API of the endpoint, by the engine's names. They
            replace the engine's names in `param` and at the start of the message.
    """
    problem = _translated(error)
    name = (renamed or {}).get(problem.param or "")
    if name is not None and isinstance(error, InvalidRequest):
        # The field at the start of the message, possibly with a subfield of the engine's field.
        field = rf"{re.escape(problem.param or '')}(\.\w+)?(?=[ :,])"
        problem.message = re.sub(rf"\A{field}", lambda _: name, problem.message)
        problem.param = name
    return problem


def _translated(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLong):
        return ApiError(400, str(error), error.parameter, "context_length_exceeded")
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error), error.parameter, "invalid_value")
    if isinstance(error, Overloaded):
        return too_busy(str(error), "queue_full", 1)
    if isinstance(error, EngineAsleep):
        return ApiError(503, "the engine sleeps", code="engine_asleep")
    if isinstance(error, EngineClosed):
        return ApiError(503, "the server is stopping", code="shutting_down")
    if isinstance(error, EngineDead):
        return ApiError(503, "the engine has ended", code="engine_dead")
    return ApiError(500, "internal error", code="internal_error")
