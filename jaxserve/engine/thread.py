"""EngineThread: runs an Engine on a thread of its own, which receives messages from others."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from jaxserve.engine.delta import Delta, Sink
from jaxserve.engine.engine import Engine
from jaxserve.errors import EngineClosed, EngineDead, InvalidRequest
from jaxserve.execution.runner import OnProgress
from jaxserve.request import FinishReason, Request
from jaxserve.settings.config import EngineConfig
from jaxserve.start.loaded import Loaded
from jaxserve.start.memory_return import return_memory

T = TypeVar("T")
_log = logging.getLogger(__name__)
# Without work for so long, memory is given back: within a pause of a conversation that would cost
# its next answer a few milliseconds.
_REST_SECONDS = 10.0
NOT_PICKLED = (
    "{} cannot be pickled or copied: it holds a device's memory and a thread. Make one in the "
    "process that uses it, from the same arguments"
)


def report_start(model: object) -> OnProgress:
    """Return a callback that writes one line to standard error when the model's files are read.

    Args:
        model: the setting `model`.
    """
    name = "the bundled model" if model is None else model
    stages: set[str] = set()

    def report(stage: str, done: int, total: int) -> None:
        if not stages:
            print(f"jaxserve: loading {name} and compiling its programs", file=sys.stderr)
        stages.add(stage)

    return report


class EngineThread:
    """The only owner of an Engine. Its methods may be called from any thread.

    It closes at the interpreter's exit at the latest, before JAX does: a thread that ran C++ code
    then would end the process with SIGABRT.

    Args:
        config: what to serve, or what `load` returned.
        on_progress: receives reports of the start.

    Attributes:
        engine: runs on this thread. Other threads may use its `requests` and read what never
            changes: `config`, `limits`, `loaded` and `tokenizer`.
    """

    def __init__(
        self, config: EngineConfig | Loaded, on_progress: OnProgress | None = None
    ) -> None:
        self.engine = Engine(config, on_progress)
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._dead: BaseException | None = None
        self._process = os.getpid()
        self._idle = True
        self._moved_at = time.monotonic()
        self._rests_at: float | None = self._moved_at + _REST_SECONDS
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def check_open(self) -> None:
        """Check that new work is accepted.

        Raises:
            EngineClosed: it was closed, or another process made it.
            EngineDead: the engine's loop ended on an error.
        """
        if os.getpid() != self._process:
            raise EngineClosed(
                "this engine belongs to the process that made it; make a new one after a fork"
            )
        if self._dead is not None:
            raise EngineDead(f"the engine ended on an error: {self._dead}") from self._dead
        if self.engine.loss is not None:
            raise EngineDead(f"the engine ended: {self.engine.loss}")
        if self._closing:
            raise EngineClosed("the engine is closed")

    def add(self, request: Request, sink: Sink) -> None:
        """Serve a request. `sink` runs on the engine's thread: it must only hand over.

        Exactly one Delta with a finish_reason arrives for each completion, whatever happens.

        Raises:
            EngineClosed, EngineDead: see `check_open`.
        """

        def deliver() -> None:
            try:
                self.engine.add(request, sink)
            except Exception as error:
                for index in range(request.sampling.n):
                    sink(_failed(request, index, error))

        self._post(deliver)

    def abort(self, request_id: str) -> None:
        """End a request. Unknown ids are ignored, as is a closed engine: all its requests ended."""
        self._for_each(self.engine.abort, [request_id])

    def abort_waiting(self, request_id: str, error: str) -> None:
        """End a request with a reason, unless it has started."""
        self._for_each(partial(self.engine.abort, error=error, waiting_only=True), [request_id])

    def pause(self, request_ids: Iterable[str]) -> None:
        """Take slots and pages from requests until `resume`. Requests that ended are ignored."""
        self._for_each(self.engine.pause, list(request_ids))

    def resume(self, request_ids: Iterable[str]) -> None:
        """Let paused requests go on where they were."""
        self._for_each(self.engine.resume, list(request_ids))

    def _for_each(self, function: Callable[[str], Any], request_ids: list[str]) -> None:
        def run() -> None:
            for request_id in request_ids:
                function(request_id)

        if self.is_alive():
            with suppress(EngineClosed, EngineDead):  # it may end between the check and the message
                self._post(run)

    def is_alive(self) -> bool:
        """Return whether requests in progress still advance."""
        is_open = os.getpid() == self._process and not self._closing
        return self._thread.is_alive() and is_open and self.engine.loss is None

    def has_ended(self) -> bool:
        """Return whether nothing more will come: every request has had its last delta by now."""
        return not self._thread.is_alive() or os.getpid() != self._process

    def standstill(self) -> float:
        """Return seconds since a step was last submitted or read; 0 while there is no work."""
        if self._idle and not self._inbox:
            return 0.0
        return time.monotonic() - self._moved_at

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread, between steps, and return its result.

        Raises:
            EngineClosed, EngineDead: the engine has ended, or ends before it answers.
            Exception: whatever the function raises.
        """
        done = threading.Event()
        box: list[tuple[Any, Exception | None]] = []

        def run() -> None:
            try:
                box.append((function(), None))
            except Exception as error:
                box.append((None, error))
            done.set()

        self._post(run)
        while not done.wait(1.0):
            if not self._thread.is_alive() and not done.is_set():
                raise EngineDead("the engine ended before it answered")
        result, error = box[0]
        if error is not None:
            raise error
        return result

    def _post(self, message: Callable[[], None]) -> None:
        with self._wake:
            self.check_open()
            self._inbox.append(message)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._take_messages():
                if self.engine.has_work:
                    before = self.engine.progress
                    self.engine.step()
                    if self.engine.progress != before:
                        self._moved_at = time.monotonic()
                        self._rests_at = self._moved_at + _REST_SECONDS
                elif self._rests_at is not None and time.monotonic() >= self._rests_at:
                    self._rests_at = None
                    return_memory()
        except BaseException as error:
            _log.critical("the engine ended on an error", exc_info=error)
            self._dead = error
        finally:
            with self._wake:
                self._closing = True
            # Late messages are handled too: their requests end here.
            self._handle(self._inbox)
            self.engine.close(None if self._dead is None else f"the engine ended: {self._dead}")

    def _take_messages(self) -> bool:
        """Handle the messages that came in, after waiting for work. Return False once closing.

        It returns without any once it is time to rest.
        """
        with self._wake:
            while not (self._inbox or self._closing or self.engine.has_work):
                self._idle = True
                rests_at = self._rests_at
                left = None if rests_at is None else max(0.0, rests_at - time.monotonic())
                if not self._wake.wait(left):
                    return True
            if self._idle:
                self._idle, self._moved_at = False, time.monotonic()
            if self._closing:
                return False
            messages = list(self._inbox)
            self._inbox.clear()
        self._handle(messages)
        return True

    @staticmethod
    def _handle(messages: Iterable[Callable[[], None]]) -> None:
        for message in messages:
            try:
                message()
            except Exception:
                _log.exception("a message to the engine failed")

    def close(self) -> None:
        """Abort all requests, stop the thread and free the device. Idempotent."""
        if os.getpid() != self._process:
            return
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)


def _failed(request: Request, index: int, error: Exception) -> Delta:
    delta = Delta(request.request_id, index, "", [], 0, FinishReason.ERROR)
    delta.fail(error if isinstance(error, InvalidRequest) else str(error))
    return delta
