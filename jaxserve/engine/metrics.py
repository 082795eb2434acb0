"""Statistics, times and histograms of an engine, as plain numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

# Bucket bounds of tokens per step, as in vLLM's `iteration_tokens_total`.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class ValueCounts:
    """Counts of values by upper bound, ten times as fast as the histogram of a library.

    Args:
        bounds: ascending upper bounds. Another bucket counts the values above the last bound.
    """

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(map(float, bounds))
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self, bounds: Iterable[float] | None = None) -> list[tuple[str, float]]:
        """Return buckets as in Prometheus: (upper bound, number of values up to the bound).

        Args:
            bounds: the bounds to return, by default all.
        """
        selected = None if bounds is None else frozenset(map(float, bounds))
        total, buckets = 0, []
        counts = self.counts.copy()  # another thread may add meanwhile
        for bound, count in zip(self.bounds, counts, strict=False):
            total += count
            if selected is None or bound in selected:
                buckets.append((str(bound), float(total)))
        return [*buckets, ("+Inf", float(total + counts[-1]))]


@dataclass(slots=True)
class SequenceTimes:
    """The times of a finished sequence, in seconds of `time.monotonic`.

    Attributes:
        arrived: the time of arrival.
        started: the time at which it first got a slot.
        first_token: the time at which its first token was read.
        last_token: the time at which its last token was read.
        num_preemptions: the number of preemptions.
    """

    arrived: float
    started: float
    first_token: float
    last_token: float
    num_preemptions: int

    @property
    def queue(self) -> float:
        """Seconds from arrival to the first slot."""
        return self.started - self.arrived

    @property
    def prefill(self) -> float:
        """Seconds from the first slot to the first token, including preemptions."""
        return self.first_token - self.started

    @property
    def decode(self) -> float:
        """Seconds from the first token to the last."""
        return self.last_token - self.first_token

    @property
    def inference(self) -> float:
        """Seconds from the first slot to the last token."""
        return self.last_token - self.started


@dataclass(frozen=True)
class MemoryUse:
    """Use of a kind of memory that belongs to layers (see `MemoryKind`).

    Attributes:
        name: name of the kind.
        unit: "page" or "slot".
        count: units in total, without the null page or the null slot.
        in_use: units that sequences hold now.
    """

    name: str
    unit: str
    count: int
    in_use: int


@dataclass
class EngineStats:
    """A snapshot of an engine's statistics. Counters start with the engine.

    Attributes:
        num_running: sequences that run now.
        num_waiting: sequences that wait now.
        num_slots: slots in total.
        num_pages: pages in total, without the null page.
        pages_in_use: pages that sequences hold now.
        num_steps: committed steps.
        prompt_tokens: prompt tokens of accepted requests.
        generation_tokens: sampled tokens.
        num_preemptions: preemptions for lack of pages.
        prefix_queries: tokens looked up in the prefix cache.
        prefix_hits: tokens found in the prefix cache.
        num_compiles: programs that requests had to wait for. It is 0 unless there is a bug.
        num_compiles_behind: programs compiled in the background.
        num_programs_missing: programs that will still be compiled in the background.
        num_failed_steps: failed steps that were computed again.
        expert_rows: for each device the rows that its experts computed. A row is a token of one
            expert. Empty without `enable_expert_parallel`.
        memory: use of each kind of memory that belongs to layers.
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
    memory: tuple[MemoryUse, ...] = ()
