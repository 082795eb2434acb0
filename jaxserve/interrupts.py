"""Signals that end a process, raised where Python code can handle them."""

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
    """Return the outermost frame that waits for an import, or None."""
    found = None
    while frame is not None:
        if frame.f_code.co_filename in _IMPORT_FILES:
            found = frame.f_back
        frame = frame.f_back
    return found


def on_signal(number: int, act: Callable[[], None]) -> None:
    """Call `act` on a signal, or after the import that is under way in the main thread.

    An exception that is raised inside an import leaves modules half initialized, and C extensions
    turn it into an ImportError.
    """

    def handle(_: int, frame: FrameType | None) -> None:
        waiting = importing_frame(frame)
        if waiting is None:
            act()
        else:
            _call_in(waiting, act)

    signal.signal(number, handle)


def _call_in(frame: FrameType, act: Callable[[], None]) -> None:
    """Call `act` before the next line of a frame, where the exception that it raises goes."""

    def trace(*_: Any) -> None:
        sys.settrace(None)
        frame.f_trace = None
        act()

    frame.f_trace = trace
    sys.settrace(lambda *_: None)


def exit_at_once(status: int) -> NoReturn:
    """End the process after its output is written, without finalizing the interpreter.

    Threads of native libraries may still run after an interrupt. Finalization would abort the
    process when one of them calls Python.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


class Interrupts:
    """Interrupts of a command, which end it with `INTERRUPTED` and without a traceback.

    The first SIGINT raises KeyboardInterrupt, so that the command can clean up. The second one
    ends the process at once.
    """

    def __init__(self) -> None:
        self._has_come = False

    def listen(self) -> None:
        """Take over SIGINT, unless the parent process has set it to be ignored."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            sys.unraisablehook = self._report
            on_signal(signal.SIGINT, self._raise)

    def run(self, command: Callable[[], int]) -> int:
        """Return the command's exit status; after a signal, end the process with it."""
        try:
            status = command()
        except KeyboardInterrupt:
            status = INTERRUPTED
        except SystemExit as error:  # of SIGTERM during a start, or of the parser
            exit_at_once(error.code if isinstance(error.code, int) else 0)
        except Exception:
            # Native code may turn the KeyboardInterrupt of a callback into another exception.
            if not self._has_come:
                raise
            status = INTERRUPTED
        if status == INTERRUPTED:
            exit_at_once(status)
        return status

    def _raise(self) -> None:
        if self._has_come:
            os._exit(INTERRUPTED)
        self._has_come = True
        raise KeyboardInterrupt

    def _report(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Raise an interrupt again that Python has caught, in a finalizer for example."""
        if unraisable.exc_type is KeyboardInterrupt:
            self._has_come = False
            _call_in(sys._getframe(1), self._raise)
        else:
            sys.__unraisablehook__(unraisable)
