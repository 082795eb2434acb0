"""Failures of the tokenizers library, as errors that belong to one request or one file.

The library raises bare Exceptions. Where its Rust code panics, it raises a PanicException, which is
no Exception, so `except Exception` would let it end a thread.
"""

from __future__ import annotations

from types import TracebackType

_MOST_CHARS = 300


class TokenizerFailure(Exception):
    """Failure of the tokenizers library."""


class LibraryCalls:
    """Context of calls of the library: it turns their failures into `TokenizerFailure`."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and (kind is Exception or is_panic(error)):
            raise TokenizerFailure(first_line(error)) from None


def is_panic(error: BaseException) -> bool:
    """Return whether an error is the panic of a library in Rust; its class cannot be imported."""
    kind = type(error)
    return (kind.__module__, kind.__name__) == ("pyo3_runtime", "PanicException")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, which may quote a whole text."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:_MOST_CHARS]
