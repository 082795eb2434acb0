"""EngineThread: runs an Engine on its own thread, which receives messages from other threads."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from jaxserve.engine.delta import Delta, Sink
from jaxserve.engine.engine import Engine
from jaxserve.errors import EngineAsleep, EngineClosed, EngineDead, InvalidRequest
from jaxserve.execution.runner import OnProgress
from jaxserve.request import FinishReason, Request
from jaxserve.settings.config import EngineConfig
from jaxserve.start.garbage import return_memory
from jaxserve.start.loaded import Loaded

T = TypeVar("T")
_log = logging.getLogger(__name__)
# Idle seconds after which memory is returned to the system. A shorter time would delay the next
# answer of a conversation by a few milliseconds.
_REST_SECONDS = 10.0


class EngineThread:
    """The owner of an Engine and of its thread, which runs the serving loop. Thread-safe.

    It closes at the latest at the interpreter's exit, before JAX: a thread that runs C++ code at
    that time would end the process with SIGABRT.
    """

    def __init__(
        self, config: EngineConfig | Loaded, on_progress: OnProgress | None = None
    ) -> None:
        # The engine. Other threads can use `requests`, and read the constants `config`, `limits`,
        # `loaded` and `tokenizer`.
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
        """Raise an error unless the engine accepts requests.

        Raises:
            EngineClosed: the engine was closed, or belongs to another process.
            EngineDead: the engine ended with an error, or another of its hosts is lost.
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

    def check_awake(self) -> None:
        """Raise an error unless the engine accepts requests and does not sleep.

        Raises:
            EngineClosed, EngineDead: see `check_open`.
            EngineAsleep: the engine sleeps.
        """
        self.check_open()
        if self.engine.is_asleep:
            raise EngineAsleep("the engine sleeps; it serves again after wake_up")

    def add(self, request: Request, sink: Sink, takes_arrays: bool = False) -> None:
        """Start a request on the engine's thread, without waiting.

        Every completion gets exactly one Delta with a finish_reason, even if the engine refuses the
        request.

        Args:
            sink: called with each Delta on the engine's thread, so it must return quickly.
            takes_arrays: whether the deltas have the tokens of a launch as arrays, without text.

        Raises:
            EngineClosed, EngineDead, EngineAsleep: see `check_awake`.
        """
        self.check_awake()

        def deliver() -> None:
            try:
                self.engine.add(request, sink, takes_arrays)
            except Exception as error:
                for index in range(request.sampling.n):
                    sink(_failed(request, index, error))

        self._post(deliver)

    def abort(self, request_id: str) -> None:
        """Abort a request, without waiting. Unknown request ids and ended engines are ignored."""
        self._for_each(self.engine.abort, [request_id])

    def abort_waiting(self, request_id: str, error: str) -> None:
        """Abort a request with an error message, without waiting, if it has never had a slot."""
        self._for_each(partial(self.engine.abort, error=error, waiting_only=True), [request_id])

    def pause(self, request_ids: Iterable[str]) -> None:
        """Free the slots and pages of requests until `resume`, without waiting. Tokens are kept."""
        self._for_each(self.engine.pause, list(request_ids))

    def resume(self, request_ids: Iterable[str]) -> None:
        """Queue paused requests again with their tokens so far, without waiting."""
        self._for_each(self.engine.resume, list(request_ids))

    def _for_each(self, function: Callable[[str], Any], request_ids: list[str]) -> None:
        def run() -> None:
            for request_id in request_ids:
                function(request_id)

        if self.is_alive():
            with suppress(EngineClosed, EngineDead):  # it may end after the check
                self._post(run)

    def is_alive(self) -> bool:
        """Return whether the engine serves requests: not after its end, a close or a fork."""
        is_open = os.getpid() == self._process and not self._closing
        return self._thread.is_alive() and is_open and self.engine.loss is None

    def has_ended(self) -> bool:
        """Return whether the engine's thread has ended, after which all deltas have been sent."""
        return not self._thread.is_alive() or os.getpid() != self._process

    def standstill(self) -> float:
        """Return the seconds since the engine last completed a step, or 0 while it is idle."""
        if self._idle and not self._inbox:
            return 0.0
        return time.monotonic() - self._moved_at

    def call(self, function: Callable[[], T]) -> T:
        """Call `function()` on the engine's thread between two steps, and return its result.

        Raises:
            EngineClosed, EngineDead: the engine has ended, or ends before the call.
            Exception: an exception of the function.
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
        self.engine.runner.count_compiles_of(threading.get_ident())
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
            # Late messages are handled too, so that their requests end.
            self._handle(self._inbox)
            self.engine.close(None if self._dead is None else f"the engine ended: {self._dead}")

    def _take_messages(self) -> bool:
        """Wait for posted messages (functions) or work, call the messages, and return True.

        Return False without calling them if the thread is to close. Return True without messages
        after `_REST_SECONDS` of idle time.
        """
        with self._wake:
            while not (self._inbox or self._closing or self.engine.has_work):
                self._idle = True
                rests_at = self._rests_at
                seconds = None if rests_at is None else max(0.0, rests_at - time.monotonic())
                if not self._wake.wait(seconds):
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
        """Abort all requests, end and join the engine's thread, free the device. Idempotent."""
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
