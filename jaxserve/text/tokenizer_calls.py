"""LibraryCalls: calls of the tokenizers library that turn its failures into ordinary errors.

The library raises bare Exceptions. If its Rust code panics, it raises a PanicException, which does
not derive from Exception, so `except Exception` would let it end a thread.
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
    """Error: a call of the tokenizers library failed or panicked."""


class LibraryCalls:
    """Caller of the tokenizers library that turns its failures and panics into `TokenizerFailure`.

    Calls are made by `run`, or in the body of a `with` statement.
    """

    def __init__(self, may_panic: bool = False) -> None:
        # True if standard error is redirected during calls, since a panic prints a dozen lines
        # there or more, which cannot be disabled. The first panic sets it.
        self.may_panic = may_panic

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function of the tokenizers library, and return its result.

        The function must hold the GIL throughout: if it may panic, the process's standard error is
        redirected during the call.

        Raises:
            TokenizerFailure: the call failed or panicked.
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
    """Return whether an error is a panic of a Rust library, by the name of its class."""
    kind = type(error)
    return (kind.__module__, kind.__name__) == ("pyo3_runtime", "PanicException")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 300 characters, or the name of its
    class.
    """
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:_MOST_CHARS]


def _without_stderr(call: Callable[[], T]) -> T:
    """Call a function, suppress the output of a panic in it, and return the function's result.

    Standard error belongs to the whole process. It is redirected and restored by functions that
    keep the GIL, as the call does, within one step of a `map`, so that no other Python thread runs
    in between. Other output during the call is written afterwards.
    """
    dup2 = ctypes.PyDLL(None).dup2
    try:
        saved = os.dup(_STDERR)
    except OSError:  # the process has no standard error
        return call()
    with tempfile.TemporaryFile() as aside:
        hide, show = partial(dup2, aside.fileno(), _STDERR), partial(dup2, saved, _STDERR)
        message = ""
        try:
            _, result, _ = map(operator.call, (hide, call, show))
        except BaseException as error:
            show()
            message = str(error)
            raise
        finally:
            os.close(saved)
            aside.seek(0)
            if written := _without_panic(aside.read(), message):
                os.write(_STDERR, written)
    return result


def _without_panic(written: bytes, message: str) -> bytes:
    if b"panicked at" not in written:
        return written
    said = message.encode().splitlines()
    lines = _PANIC_HEAD.sub(b"", written).splitlines(keepends=True)
    return b"".join(
        line for line in lines if line.rstrip() not in said and not _PANIC_LINE.match(line)
    )
