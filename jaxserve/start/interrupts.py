"""Handlers of SIGINT and SIGTERM that raise an exception at a place where it is safe."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED = 130
_IMPORT_FILES = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")


def importing_frame(frame: FrameType | None) -> FrameType | None:
    """Return the outermost caller of `frame` whose import statement is running.

    The result is None if no import is running.
    """
    outermost = None
    while frame is not None:
        if frame.f_code.co_filename in _IMPORT_FILES:
            outermost = frame.f_back
        frame = frame.f_back
    return outermost


def on_signal(number: int, act: Callable[[], None]) -> None:
    """Install a signal handler that calls `act`, after a running import of the main thread ends.

    An exception that is raised inside an import leaves modules half initialized, and C extensions
    turn it into an ImportError.

    Args:
        number: number of the signal.
        act: a function without arguments, which may raise an exception.
    """

    def handle(_: int, frame: FrameType | None) -> None:
        waiting = importing_frame(frame)
        if waiting is None:
            act()
        else:
            _call_in(waiting, act)

    signal.signal(number, handle)


def _call_in(frame: FrameType, act: Callable[[], None]) -> None:
    # `act` is called before the next line of `frame`, which then receives its exception.
    def trace(*_: Any) -> None:
        sys.settrace(None)
        frame.f_trace = None
        act()

    frame.f_trace = trace
    sys.settrace(lambda *_: None)


def run_interruptible(command: Callable[[], int]) -> int:
    """Run a command of the command line and return its exit status. SIGINT ends the process.

    SIGINT raises KeyboardInterrupt in the command, so that the command can clean up. The process
    then ends with status `INTERRUPTED` and no traceback. SIGINT stays ignored if the parent process
    has set it so. A SystemExit of the command also ends the process.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        sys.unraisablehook = _raise_again
        on_signal(signal.SIGINT, _interrupt)
    try:
        status = command()
        # The command is complete: an interrupt during finalization must not change the status.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return status
    except KeyboardInterrupt:
        _exit_at_once(INTERRUPTED)
    except SystemExit as error:  # of SIGTERM during a start, or of the parser
        _exit_at_once(error.code if isinstance(error.code, int) else 0)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _raise_again(unraisable: sys.UnraisableHookArgs) -> None:
    # Python has caught the interrupt, in a finalizer for example.
    if unraisable.exc_type is KeyboardInterrupt:
        _call_in(sys._getframe(1), _interrupt)
    else:
        sys.__unraisablehook__(unraisable)


def _exit_at_once(status: int) -> NoReturn:
    # Threads of native libraries may still run after a signal. Finalization of the interpreter
    # would abort the process when one of them calls Python.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
