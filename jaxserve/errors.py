"""Errors that callers can catch. A message names the fault, its place and the allowed values."""


class JaxserveError(Exception):
    """Base class of all errors of jaxserve."""


class InvalidRequest(JaxserveError, ValueError):
    """A request or a setting with an invalid field, token or size.

    Attributes:
        parameter: name of the invalid field, or None if it is not a single field.
    """

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class PromptTooLong(InvalidRequest):
    """A prompt that leaves no room for an answer in the model's context."""


class UnsupportedModel(JaxserveError, ValueError):
    """A model whose architecture or configuration jaxserve does not support."""


class CheckpointError(JaxserveError, ValueError):
    """Files of a model that are missing, malformed, or contradict its configuration."""


class DeviceError(JaxserveError, RuntimeError):
    """A device that JAX cannot start or does not support."""


class Overloaded(JaxserveError, RuntimeError):
    """The queue is full. The caller may try again later."""


class EngineClosed(JaxserveError, RuntimeError):
    """The engine was closed or belongs to another process, and accepts no requests."""


class EngineDead(JaxserveError, RuntimeError):
    """The engine loop has ended after an error from which it could not recover."""
