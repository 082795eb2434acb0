"""Stream: deltas from the engine's thread for one consumer on an event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from jaxserve.engine.delta import Delta
from jaxserve.engine.thread import EngineThread
from jaxserve.request import Request

# Most tokens of a merged delta. Appending to a text copies all of it.
MAX_JOINED = 64


class Stream:
    """An asyncio stream of the deltas (new tokens and text) of a group of requests.

    The constructor starts the requests. If too many tokens are unread, the requests are paused:
    they free their slots and pages, and continue when the reader has taken all deltas.

    Args:
        delivery: transfers the deltas to the event loop of the reader.
        max_unread: number of unread tokens above which the requests are paused. None for no limit.
    """

    def __init__(
        self,
        thread: EngineThread,
        delivery: LoopDelivery,
        requests: Iterable[Request],
        max_unread: int | None = None,
    ) -> None:
        self.requests = list(requests)
        self._thread = thread
        self._unfinished = {request.request_id: request.sampling.n for request in self.requests}
        self._deltas: list[Delta] = []
        self._arrived = asyncio.Event()
        self._failure: Exception | None = None
        self._max_unread = max_unread
        self.num_unread = 0
        self.is_paused = False
        # Called with True when the requests are paused, and False when they continue.
        self.on_pause: Callable[[bool], None] = _ignore
        try:
            for request in self.requests:
                thread.add(request, lambda delta: delivery.put(self, delta))
        except BaseException:
            self.close()
            raise

    @property
    def is_finished(self) -> bool:
        """Whether all completions of the stream have ended. Deltas may still be unread."""
        return not self._unfinished

    async def take(self) -> list[Delta]:
        """Wait for a delta, and return a list of all deltas since the previous call.

        Deltas are in the order of their tokens. Paused requests continue after the call.

        Raises:
            Exception: the error that was passed to `fail`.
        """
        while not self._deltas and self._failure is None:
            self._arrived.clear()
            await self._arrived.wait()
        if self._failure is not None:
            raise self._failure
        deltas, self._deltas = self._deltas, []
        self.num_unread = 0
        if self.is_paused:
            self.is_paused = False
            self._thread.resume(self._unfinished)
            self.on_pause(False)
        return deltas

    def put(self, delta: Delta) -> None:
        """Add a delta to the stream, and pause the requests if too many tokens are unread.

        A small delta is merged into the last unread one. The method must be called on the event
        loop of the reader.
        """
        unread = self._deltas
        if not (unread and _extends(unread[-1], delta)):
            unread.append(delta)
        self.num_unread += len(delta.token_ids)
        if delta.finish_reason is not None:
            count = self._unfinished.get(delta.request_id, 0) - 1
            if count > 0:
                self._unfinished[delta.request_id] = count
            else:
                self._unfinished.pop(delta.request_id, None)
        limit = self._max_unread
        if limit is not None and self.num_unread > limit and not self.is_paused:
            self.is_paused = True
            self._thread.pause(self._unfinished)
            self.on_pause(True)
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """End the stream with an error of its consumer, which `take` then raises."""
        self._failure = error
        self._arrived.set()

    def close(self) -> None:
        """Abort all requests of the stream that have not ended. Idempotent."""
        for request_id in self._unfinished:
            self._thread.abort(request_id)
        self._unfinished = {}


def _extends(last: Delta, delta: Delta) -> bool:
    """Append `delta` to the delta `last` of a stream, and return whether this loses no information.

    Only deltas of the same completion without finish_reason and log-probabilities are merged.
    Readers do less work for one delta than for two.
    """
    if (
        last.index != delta.index
        or last.request_id != delta.request_id
        or delta.finish_reason is not None
        or last.finish_reason is not None
        or delta.logprobs is not None
        or last.logprobs is not None
        or delta.prompt_logprobs is not None
        or last.num_cached_tokens < delta.num_cached_tokens
        or len(last.token_ids) >= MAX_JOINED
    ):
        return False
    last.text += delta.text
    last.token_ids += delta.token_ids
    return True


def _ignore(is_paused: bool) -> None:
    """Ignore a pause of a stream's requests (the default of `Stream.on_pause`)."""


class LoopDelivery:
    """The transfer of deltas from the engine's thread to the streams of an event loop, in rounds.

    A round delivers all deltas that have been queued since the previous round. The engine and its
    readers share one interpreter, so the time that readers spend is lost to the engine. Rounds are
    spaced so that they and the immediate work of readers take at most `SHARE` of the time. A few
    readers get each token at once. Many readers get several tokens at a time, at most
    `LONGEST_WAIT` seconds late.
    """

    SHARE = 0.03
    LONGEST_WAIT = 0.06

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._deltas: deque[tuple[Stream, Delta]] = deque()
        self._lock = threading.Lock()
        self._is_called = False
        self._next_round = 0.0
        self._cpu_seconds = 0.0

    def put(self, stream: Stream, delta: Delta) -> None:
        """Queue a delta for a stream, which gets it in the next round. Thread-safe."""
        self._deltas.append((stream, delta))
        with self._lock:
            if not self._is_called:
                self.loop.call_soon_threadsafe(self._deliver)
                self._is_called = True

    def _deliver(self) -> None:
        if self.loop.time() < self._next_round:
            self.loop.call_at(self._next_round, self._deliver)
            return
        self._cpu_seconds = time.thread_time()
        with self._lock:
            self._is_called = False
        while self._deltas:
            stream, delta = self._deltas.popleft()
            stream.put(delta)
        self.loop.call_soon(self._rest)

    def _rest(self) -> None:
        """Set the earliest time of the next round from the CPU time that this round has taken.

        The event loop calls the method after all readers that the round has woken.
        """
        spent = time.thread_time() - self._cpu_seconds
        rest = min(spent * (1.0 / self.SHARE - 1.0), self.LONGEST_WAIT)
        self._next_round = self.loop.time() + rest
