"""RequestStats: the times of a request, collected from its deltas."""

from __future__ import annotations

import time

from jaxserve.engine.delta import Delta
from jaxserve.outputs import RequestStateStats
from jaxserve.request import Request


class RequestStats:
    """The combined times of a request's completions."""

    def __init__(self, request: Request) -> None:
        since = time.monotonic() - request.arrival_time
        self.value = RequestStateStats(arrival_time=time.time() - since)  # the statistics so far

    def add(self, delta: Delta) -> None:
        """Add the tokens and times of a delta to `value`."""
        stats, times = self.value, delta.times
        stats.num_generation_tokens += len(delta.token_ids)
        if times is None:
            return
        is_first = not stats.first_token_ts
        stats.queued_ts = times.arrived
        stats.num_preemptions += times.num_preemptions
        stats.last_token_ts = max(stats.last_token_ts, times.last_token)
        if is_first or times.started < stats.scheduled_ts:
            stats.scheduled_ts = times.started
        if is_first or times.first_token < stats.first_token_ts:
            stats.first_token_ts = times.first_token
            stats.first_token_latency = times.first_token - times.arrived
