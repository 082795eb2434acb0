"""Measurements of the server's requests: plain numbers, cheap to add to."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence as Listing

_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_LONG = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = tuple(float(2**power) for power in range(20))


class Histogram:
    """Counts of values by upper bound; cheaper than a library's by an order of magnitude.

    Args:
        bounds: ascending; one more bucket takes all beyond the last.
    """

    def __init__(self, bounds: Listing[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """Return Prometheus's buckets: (upper bound, number of values up to it)."""
        total, buckets = 0, []
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((str(bound), float(total)))
        return buckets


class RequestMetrics:
    """Counts of one model's requests, from the server's start. Times are in seconds."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(_SHORT)
        self.inter_token_latency = Histogram(_SHORT)
        self.e2e_latency = Histogram(_LONG)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self.endings: Counter[str] = Counter()

    def tokens(self, since_start: float, since_last: float, count: int, is_first: bool) -> None:
        """Add the arrival of a request's first tokens, or of further ones."""
        if not count:
            return
        if is_first:
            self.time_to_first_token.add(since_start)
        else:
            self.inter_token_latency.add(since_last / count, count)

    def finished(self, seconds: float, prompt: int, generated: int) -> None:
        """Add a completion that ended after these seconds and tokens."""
        self.e2e_latency.add(seconds)
        self.prompt_tokens.add(prompt)
        self.generation_tokens.add(generated)

    def ended(self, reason: str, count: int) -> None:
        self.endings[reason] += count
