"""Stream: deltas from the engine's thread, handed to one consumer on an event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from jaxserve.engine.delta import Delta
from jaxserve.engine.thread import EngineThread
from jaxserve.request import Request

# Tokens that wait as one delta at most: adding text to text costs its whole length.
MAX_JOINED = 64


class Stream:
    """The deltas of a group of requests, in the order in which they were drawn.

    A stream whose reader falls behind is paused: its requests give up their slots and pages,
    and go on where they were once the reader has caught up.

    Args:
        thread: serves the requests; they start at once.
        delivery: brings the deltas to this event loop.
        requests: already checked (see `EngineThread.request`).
        max_unread: tokens that may lie unread before the requests are paused; None for no bound.

    Attributes:
        is_paused: whether the requests wait for the reader.
        num_unread: tokens that have come and were not taken.
        on_pause: called with True when the requests are paused, and False when they go on.
    """

    def __init__(
        self,
        thread: EngineThread,
        delivery: Delivery,
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
        self.on_pause: Callable[[bool], None] = _ignore
        try:
            for request in self.requests:
                thread.add(request, lambda delta: delivery.put(self, delta))
        except BaseException:
            self.close()
            raise

    @property
    def is_finished(self) -> bool:
        """Return whether every completion has ended; what came last may still be unread."""
        return not self._unfinished

    async def take(self) -> list[Delta]:
        """Wait for a delta, and return all that have come since the last call.

        Raises:
            Exception: the error that `fail` was given. Nothing comes after that.
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
        """Take in a delta; only on the event loop."""
        unread = self._deltas
        if not (unread and _extends(unread[-1], delta)):
            unread.append(delta)
        self.num_unread += len(delta.token_ids)
        if delta.finish_reason is not None:
            left = self._unfinished.get(delta.request_id, 0) - 1
            if left > 0:
                self._unfinished[delta.request_id] = left
            else:
                self._unfinished.pop(delta.request_id, None)
        limit = self._max_unread
        if limit is not None and self.num_unread > limit and not self.is_paused:
            self.is_paused = True
            self._thread.pause(self._unfinished)
            self.on_pause(True)
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """End the stream with an error of the consumer's own making, such as a deadline."""
        self._failure = error
        self._arrived.set()

    def close(self) -> None:
        """Abort what has not ended. Idempotent."""
        for request_id in self._unfinished:
            self._thread.abort(request_id)
        self._unfinished = {}


def _extends(last: Delta, delta: Delta) -> bool:
    """Join a delta to the one before it, and return True, where nothing is lost by it.

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
    """Ignore a pause; the default of `on_pause`."""


class Delivery:
    """Carrier of deltas from the engine's thread to an event loop, many in one go.

    The engine and its readers share one interpreter, so every moment that readers take for small
    pieces is lost to the engine. Rounds of delivery are therefore spaced so that they, and what the
    readers do at once with what they got, take no more than `SHARE` of the time. A few readers
    get each token alone and at once, many get several at a time, none more than `LONGEST_WAIT`
    seconds late.

    Args:
        loop: where the readers run.
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
        """Pass on a delta; from any thread."""
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
        """Set the time of the next round, behind all readers that this round has woken."""
        spent = time.thread_time() - self._cpu_seconds
        rest = min(spent * (1.0 / self.SHARE - 1.0), self.LONGEST_WAIT)
        self._next_round = self.loop.time() + rest
