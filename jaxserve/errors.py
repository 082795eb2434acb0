"""Errors that callers can catch. A message names the fault, its place and the allowed values."""


class JaxserveError(Exception):
    """Base class of the errors that jaxserve defines."""


class InvalidRequest(JaxserveError, ValueError):
    """Error for a request or an engine setting with an invalid field, token or size.

    Attributes:
        parameter: name of the invalid field, or None if the error is not about a single field.
    """

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class PromptTooLong(InvalidRequest):
    """Error for a prompt that fills the model's context, so that no token can be generated."""


class UnsupportedModel(JaxserveError, ValueError):
    """Error for a model whose architecture or configuration jaxserve does not support."""


class CheckpointError(JaxserveError, ValueError):
    """Error for a model whose files are missing or malformed, or contradict its configuration."""


class DeviceError(JaxserveError, RuntimeError):
    """Error for a device (GPU or CPU) that JAX cannot start or that jaxserve does not support."""


class Overloaded(JaxserveError, RuntimeError):
    """Error for a request that is refused because the queue is full. It may be sent again later."""


class EngineClosed(JaxserveError, RuntimeError):
    """Error for a call of an engine that was closed, or that was created by another process."""


class EngineAsleep(JaxserveError, RuntimeError):
    """Error for a request to an engine that sleeps. It may be sent again after `wake_up`."""


class EngineDead(JaxserveError, RuntimeError):
    """Error for a call of an engine that has ended after an unrecoverable error."""
