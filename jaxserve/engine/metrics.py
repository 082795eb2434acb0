"""Counters, times and histograms of an engine: plain numbers, cheap to add to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

# Tokens of a step: vLLM's buckets of `iteration_tokens_total`.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    """Counts of values by upper bound; cheaper than a library's by an order of magnitude.

    Args:
        bounds: ascending; one more bucket takes all beyond the last.
    """

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(map(float, bounds))
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self, bounds: Iterable[float] | None = None) -> list[tuple[str, float]]:
        """Return Prometheus's buckets: (upper bound, number of values up to it).

        Args:
            bounds: those of the histogram's bounds to return; all by default.
        """
        wanted = None if bounds is None else frozenset(map(float, bounds))
        total, buckets = 0, []
        counts = self.counts.copy()  # another thread may add meanwhile
        for bound, count in zip(self.bounds, counts, strict=False):
            total += count
            if wanted is None or bound in wanted:
                buckets.append((str(bound), float(total)))
        return [*buckets, ("+Inf", float(total + counts[-1]))]


@dataclass(slots=True)
class SequenceTimes:
    """Times of a sequence that ended, in seconds of `time.monotonic`.

    Attributes:
        arrived: when the engine took it in.
        started: when it was first given a slot.
        first_token, last_token: when the steps that drew them were read.
        num_preemptions: how often it was sent back to wait.
    """

    arrived: float
    started: float
    first_token: float
    last_token: float
    num_preemptions: int

    @property
    def queue(self) -> float:
        """Seconds before it was first given a slot."""
        return self.started - self.arrived

    @property
    def prefill(self) -> float:
        """Seconds from its slot to its first token, preemptions included."""
        return self.first_token - self.started

    @property
    def decode(self) -> float:
        """Seconds from its first token to its last."""
        return self.last_token - self.first_token

    @property
    def inference(self) -> float:
        """Seconds from its slot to its last token."""
        return self.last_token - self.started


@dataclass
class EngineStats:
    """A snapshot of one engine; counters run from its start.

    Attributes:
        num_running, num_waiting: sequences now.
        num_slots, num_pages: what there is (the null page not counted).
        pages_in_use: pages that sequences hold now.
        num_steps: steps committed.
        prompt_tokens: prompt tokens of the requests taken in.
        generation_tokens: tokens drawn.
        num_preemptions: sequences sent back to wait for lack of pages.
        prefix_queries, prefix_hits: tokens looked up in the prefix cache, and found there.
        num_compiles: programs compiled since the engine was ready, which a request waited for:
            none, or there is a defect.
        num_compiles_behind: programs compiled beside the engine, for which no request waited.
        num_programs_missing: programs that would fit better and are still to come.
        num_failed_steps: steps that were lost and computed again.
        expert_rows: by device, the rows, a token for one expert each, that its experts computed;
            empty without `enable_expert_parallel`.
    """

    num_running: int
    num_waiting: int
    num_slots: int
    num_pages: int
    pages_in_use: int
    num_steps: int
    prompt_tokens: int
    generation_tokens: int
    num_preemptions: int
    prefix_queries: int
    prefix_hits: int
    num_compiles: int
    num_compiles_behind: int
    num_programs_missing: int
    num_failed_steps: int
    expert_rows: tuple[int, ...] = ()
