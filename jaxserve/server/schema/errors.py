"""ApiError: an answer that is an error, and which one each exception becomes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import EngineClosed, EngineDead, InvalidRequest, Overloaded, PromptTooLong

MAX_MESSAGE_CHARS = 600
# OpenAI's error types by status; Anthropic's client needs its own names.
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
    """A refusal or failure as its client sees it.

    Args:
        status: of HTTP.
        message: what was wrong, and what is allowed; cut to `MAX_MESSAGE_CHARS`.
        param: the field to blame, if it is one.
        code: short name for programs.
        headers: to send along.
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
        """Return the error object; `type` beside it is what Anthropic's client looks for."""
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
    """Return a refusal for lack of room; the client may try again after `seconds`."""
    return ApiError(429, message, code=code, headers={"retry-after": str(max(1, round(seconds)))})


def too_many_connections() -> ApiError:
    """Return a refusal of all but /health, to a connection beyond the limit."""
    return ApiError(503, "too many connections", code="too_many_connections")


def as_api_error(error: Exception, renamed: Mapping[str, str] | None = None) -> ApiError:
    """Return the answer for an exception. It shows nothing of the server's internals.

    Args:
        error: the exception.
        renamed: see `EndpointRequest`.
    """
    problem = _translated(error)
    name = (renamed or {}).get(problem.param or "")
    if name is not None and isinstance(error, InvalidRequest):
        # The field at the start, with or without a part of it that only the engine's field has.
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
    if isinstance(error, EngineClosed):
        return ApiError(503, "the server is stopping", code="shutting_down")
    if isinstance(error, EngineDead):
        return ApiError(503, "the engine has ended", code="engine_dead")
    return ApiError(500, "internal error", code="internal_error")
