"""Errors that callers can catch.

Every message says what was wrong, where, and what is allowed.
"""


class JaxserveError(Exception):
    """Base of every error that jaxserve raises on purpose."""


class InvalidRequest(JaxserveError, ValueError):
    """A request that can never be served: its fields, its tokens or its size.

    Attributes:
        parameter: name of the offending field, or None where no single field is to blame.
    """

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class PromptTooLong(InvalidRequest):
    """A prompt that leaves no room for an answer within the model's length."""


class UnsupportedModel(JaxserveError, ValueError):
    """A model whose architecture or configuration jaxserve does not compute."""


class CheckpointError(JaxserveError, ValueError):
    """Files that do not hold the weights which the model's configuration promises."""


class DeviceError(JaxserveError, RuntimeError):
    """A device that JAX cannot start, or that its build does not run."""


class Overloaded(JaxserveError, RuntimeError):
    """More work than the configured queue holds; try again later."""


class EngineClosed(JaxserveError, RuntimeError):
    """The engine was closed, or belongs to another process, and takes no more work."""


class EngineDead(JaxserveError, RuntimeError):
    """The engine loop ended on an error it could not recover from."""
