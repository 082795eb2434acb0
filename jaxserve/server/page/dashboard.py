"""Endpoint GET /dashboard/events: server-sent events with the state of an engine, four per second.

Events contain numbers only, without prompts or answers, since keys may belong to different users.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from dataclasses import dataclass

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from jaxserve.engine.engine import Engine
from jaxserve.engine.metrics import EngineStats
from jaxserve.scheduling.sequence import Sequence
from jaxserve.server.api.streaming import event, while_connected
from jaxserve.server.http.app import App
from jaxserve.server.schema.errors import as_api_error, too_busy
from jaxserve.server.served.models import ServedModel

PERIOD = 0.25
MAX_WATCHERS = 64
MAX_RUNNING, MAX_WAITING = 256, 64
MAX_CELLS = 4096
# Codes of the page map. FIRST_SLOT + n: slot n holds the page.
BLANK, CACHED, SHARED, FIRST_SLOT = range(4)


class CompletionRow(msgspec.Struct, array_like=True):
    """Token counts of one running or waiting completion, sent as a JSON array of its fields."""

    slot: int  # slot in which it runs, -1 if it waits
    request: str  # the engine's id of the request
    index: int  # number of the completion in its request
    prompt: int  # number of prompt tokens
    cached: int  # number of prompt tokens found in the prefix cache
    computed: int  # number of prompt and answer tokens whose KV is in the cache
    generated: int  # number of generated tokens
    limit: int  # maximum number of generated tokens


class Pages(msgspec.Struct):
    """Map of the pages of a KV cache, with the numbers of held, shared and cached pages.

    The map is a list of runs: a code for the state of the pages, and a number of cells.
    """

    total: int  # number of pages
    held: int  # pages with a holder
    shared: int  # pages with several holders
    cached: int  # free pages in the prefix cache
    per_cell: int  # pages per cell of the map, of which the first is shown
    # Alternating codes and cell counts, in the order of the pages, without the null page.
    runs: list[int]


class Snapshot(msgspec.Struct):
    """State of an engine for the dashboard: time, statistics, completions, pages, latencies."""

    at: float  # seconds on a monotonic clock
    stats: EngineStats
    running: list[CompletionRow]  # running completions by slot, at most MAX_RUNNING
    # Waiting completions, at most MAX_WAITING, the next to start first.
    waiting: list[CompletionRow]
    pages: Pages  # map of the cache pages
    # Number and sum in seconds of the measured times to first token.
    first_token: tuple[int, float] = (0, 0.0)
    # Number and sum in seconds of the measured times between tokens.
    inter_token: tuple[int, float] = (0, 0.0)


@dataclass
class _Copy:
    """Copy of the engine's data that must be read between two steps, as input of a snapshot."""

    stats: EngineStats
    running: list[CompletionRow]
    waiting: list[CompletionRow]
    ref_count: np.ndarray
    is_cached: np.ndarray
    held_pages: np.ndarray
    num_held: list[int]


def _copy(engine: Engine) -> _Copy:
    """Return a copy of an engine's statistics, completions and page arrays.

    It runs on the engine's thread between two steps. Slower work is done elsewhere.
    """
    slots, scheduler, pool = engine.slots, engine.scheduler, engine.pool
    running = sorted(scheduler.running_sequences(), key=lambda sequence: sequence.slot)
    waiting = heapq.nsmallest(MAX_WAITING, scheduler.waiting, key=scheduler.waiting.rank)
    pages = [pool.pages_of(slots.all_pages(sequence.slot)) for sequence in running]
    return _Copy(
        engine.stats(),
        [_running(engine, sequence) for sequence in running],
        [_row(sequence, len(sequence.token_ids), 0) for sequence in waiting],
        pool.by_page(pool.ref_count)[1:],
        pool.by_page(pool.is_cached)[1:],
        np.concatenate(pages) - 1 if pages else np.zeros(0, np.int32),
        [len(slot_pages) for slot_pages in pages],
    )


def _running(engine: Engine, sequence: Sequence) -> CompletionRow:
    slots, slot = engine.slots, sequence.slot
    return _row(sequence, int(slots.num_known[slot]), int(slots.num_computed[slot]))


def _row(sequence: Sequence, num_known: int, num_computed: int) -> CompletionRow:
    prompt = sequence.num_prompt
    return CompletionRow(
        sequence.slot,
        sequence.request.request_id,
        sequence.index,
        prompt,
        max(sequence.num_cached, 0),
        num_computed,
        num_known - prompt,
        sequence.request.max_length - prompt,
    )


def page_map(ref_count: np.ndarray, is_cached: np.ndarray, owner: np.ndarray) -> Pages:
    """Return the map of the pages of a KV cache, reduced to at most MAX_CELLS cells.

    A cell shows the slot of a page, or that it is shared, cached or blank.

    Args:
        ref_count: i32[P], number of holders of each page, without the null page.
        is_cached: bool[P], whether the prefix cache contains the page.
        owner: i32[P], a slot that holds the page, or -1.
    """
    total = len(ref_count)
    is_held, is_shared = ref_count > 0, ref_count > 1
    codes = np.where(owner >= 0, owner + FIRST_SLOT, np.where(is_cached, CACHED, BLANK))
    codes[is_shared] = SHARED
    per_cell = -(-total // MAX_CELLS)
    cells = codes[::per_cell]
    starts = np.flatnonzero(np.diff(cells, prepend=-1))
    lengths = np.diff(starts, append=len(cells))
    return Pages(
        total,
        int(np.count_nonzero(is_held)),
        int(np.count_nonzero(is_shared)),
        int(np.count_nonzero(is_cached & ~is_held)),
        per_cell,
        np.stack([cells[starts], lengths], axis=1).ravel().tolist(),
    )


def take_snapshot(model: ServedModel) -> Snapshot:
    """Return a snapshot of the state of a model's engine.

    It waits for the step in progress, so it must not run on the event loop.

    Raises:
        EngineClosed, EngineDead: the engine has stopped.
    """
    metrics = model.request_metrics
    copy = model.llm.inspect(_copy)
    owner = np.full(len(copy.ref_count), -1)
    owner[copy.held_pages] = np.repeat([row.slot for row in copy.running], copy.num_held)
    pages = page_map(copy.ref_count, copy.is_cached, owner)
    first, between = metrics.time_to_first_token, metrics.inter_token_latency
    return Snapshot(
        time.monotonic(),
        copy.stats,
        copy.running[:MAX_RUNNING],
        copy.waiting,
        pages,
        (sum(first.counts), first.sum),
        (sum(between.counts), between.sum),
    )


class Dashboard:
    """Endpoint of the dashboard's events. All its clients share the snapshots of an engine.

    The number of open streams is limited to MAX_WATCHERS.
    """

    def __init__(self) -> None:
        self._snapshots: dict[ServedModel, tuple[float, asyncio.Future[bytes]]] = {}
        self._num_watchers = 0

    async def events(self, request: Request) -> Response:
        """Endpoint `GET /dashboard/events?model=NAME`: stream snapshots of the model's engine.

        Raises:
            ApiError: 404 if there is no such model, 429 if there are too many streams.
        """
        app: App = request.app.state.served
        model = app.models.find(request.query_params.get("model"))
        if self._num_watchers >= MAX_WATCHERS:
            raise too_busy(f"{MAX_WATCHERS} dashboards are open already", "too_many_watchers", 10)
        return _Feed(self, model, app)

    async def latest(self, model: ServedModel) -> bytes:
        """Return a server-sent event with a snapshot of a model's engine, as encoded bytes.

        Clients share a snapshot for up to half a period. Then the next call takes a new one on
        another thread.
        """
        now = time.monotonic()
        taken, future = self._snapshots.get(model, (-PERIOD, None))
        if future is None or (future.done() and now - taken >= PERIOD / 2):
            future = asyncio.ensure_future(asyncio.to_thread(_event_of, model))
            self._snapshots[model] = (now, future)
        return await asyncio.shield(future)

    def watch(self, change: int) -> None:
        """Add `change`, 1 or -1, to the number of open streams."""
        self._num_watchers += change


def _event_of(model: ServedModel) -> bytes:
    return event(take_snapshot(model))


class _Feed(Response):
    """Streaming response with a snapshot of an engine per period, as server-sent events.

    It ends when the client disconnects or the server stops. An error is sent as the last event.
    """

    def __init__(self, dashboard: Dashboard, model: ServedModel, app: App) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self._dashboard = dashboard
        self._model = model
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._dashboard.watch(1)
        try:
            await while_connected(receive, self._run(send))
        finally:
            self._dashboard.watch(-1)

    async def _run(self, send: Send) -> None:
        body = await self._dashboard.latest(self._model)
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        try:
            while not self._app.lifecycle.is_draining:
                await send({"type": "http.response.body", "body": body, "more_body": True})
                await asyncio.sleep(PERIOD)
                body = await self._dashboard.latest(self._model)
            last = b""
        except Exception as error:
            last = event(as_api_error(error).body(), "error")
        await send({"type": "http.response.body", "body": last, "more_body": False})


def routes() -> list[BaseRoute]:
    return [Route("/dashboard/events", Dashboard().events, methods=["GET"])]
