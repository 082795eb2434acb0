"""Calls of the tokenizers library, whose failures belong to one request or one file.

The library raises bare Exceptions. Where its Rust code panics, it raises a PanicException, which is
no Exception, so `except Exception` would let it end a thread.
"""

from __future__ import annotations

import ctypes
import operator
import os
import re
import tempfile
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
_STDERR = 2
_MOST_CHARS = 300
_PANIC_HEAD = re.compile(rb"^\n?thread '.*panicked at .*\n", re.MULTILINE)
_PANIC_LINE = re.compile(rb"stack backtrace:$|note: (?:run with|Some details)| +\d+: | +at ")


class TokenizerFailure(Exception):
    """Failure of the tokenizers library."""


class LibraryCalls:
    """Calls of the library; as a context, of whatever runs in it.

    Attributes:
        may_panic: whether calls run with standard error set aside, since a panic prints a dozen
            lines or more there, which no setting prevents. It is set by the first panic too.
    """

    def __init__(self, may_panic: bool = False) -> None:
        self.may_panic = may_panic

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function of the library that holds Python's lock throughout.

        Raises:
            TokenizerFailure: it failed or panicked.
        """
        try:
            if self.may_panic:
                return _without_stderr(partial(function, *args, **kwargs))
            return function(*args, **kwargs)
        except BaseException as error:
            self._translate(error)
            raise

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._translate(error)

    def _translate(self, error: BaseException) -> None:
        if is_panic(error):
            self.may_panic = True
        elif type(error) is not Exception:
            return
        raise TokenizerFailure(first_line(error)) from None


def is_panic(error: BaseException) -> bool:
    """Return whether an error is the panic of a library in Rust; its class cannot be imported."""
    kind = type(error)
    return (kind.__module__, kind.__name__) == ("pyo3_runtime", "PanicException")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, which may quote a whole text."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:_MOST_CHARS]


def _without_stderr(call: Callable[[], T]) -> T:
    """Call a function, and suppress the output of a panic in it.

    Standard error is the whole process's. So it is replaced, and put back, by functions that keep
    Python's lock, as the call does, in one step of a `map`: no other thread of Python runs in
    between. Output of threads without the lock is written afterwards.
    """
    dup2 = ctypes.PyDLL(None).dup2
    try:
        kept = os.dup(_STDERR)
    except OSError:  # the process has none
        return call()
    with tempfile.TemporaryFile() as aside:
        hide, show = partial(dup2, aside.fileno(), _STDERR), partial(dup2, kept, _STDERR)
        message = ""
        try:
            _, result, _ = map(operator.call, (hide, call, show))
        except BaseException as error:
            show()
            message = str(error)
            raise
        finally:
            os.close(kept)
            aside.seek(0)
            if written := _without_panic(aside.read(), message):
                os.write(_STDERR, written)
    return result


def _without_panic(written: bytes, message: str) -> bytes:
    """Return the output to standard error without the lines of a panic."""
    if b"panicked at" not in written:
        return written
    said = message.encode().splitlines()
    lines = _PANIC_HEAD.sub(b"", written).splitlines(keepends=True)
    return b"".join(
        line for line in lines if line.rstrip() not in said and not _PANIC_LINE.match(line)
    )
