"""Statistics, times and histograms of an engine, as plain numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from jaxserve.execution.state import PAGES

# Bucket bounds of tokens per step, as in vLLM's `iteration_tokens_total`.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class ValueCounts:
    """A histogram: the number of added values in each bucket, and their sum.

    It takes a tenth of the time of a metrics library.

    Args:
        bounds: ascending upper bounds of the buckets. A last bucket counts the values above them.
    """

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(map(float, bounds))
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self, bounds: Iterable[float] | None = None) -> list[tuple[str, float]]:
        """Return the buckets of the histogram as in Prometheus: (upper bound, number) pairs.

        The number counts all values up to the bound. The bound is text, and the last one is "+Inf".

        Args:
            bounds: the bounds to return, besides "+Inf". None for all.
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
    """Times of a finished sequence in seconds of `time.monotonic`, and number of preemptions."""

    arrived: float  # the time of arrival
    started: float  # the time at which it first got a slot
    first_token: float  # the time at which its first token was read
    last_token: float  # the time at which its last token was read
    num_preemptions: int  # the number of preemptions

    @property
    def queue(self) -> float:
        """Seconds that the sequence waited from its arrival to its first slot."""
        return self.started - self.arrived

    @property
    def prefill(self) -> float:
        """Seconds from the sequence's first slot to its first token, including preemptions."""
        return self.first_token - self.started

    @property
    def decode(self) -> float:
        """Seconds from the sequence's first token to its last token."""
        return self.last_token - self.first_token

    @property
    def inference(self) -> float:
        """Seconds from the sequence's first slot to its last token."""
        return self.last_token - self.started


@dataclass(frozen=True)
class MemoryUse:
    """Total and used units of one kind of memory that holds the state of layers (see `MemoryKind`).

    Attributes:
        name: name of the kind, such as "KV cache".
        unit: "page" or "slot".
        count: units in total, without the null page or the null slot.
        in_use: units that sequences hold now.
    """

    name: str
    unit: str
    count: int
    in_use: int


@dataclass(frozen=True)
class SnapshotStats:
    """Number of the states of prefixes (snapshots), and counters of them since the start.

    Attributes:
        held: snapshots that cached pages have now.
        saved: snapshots taken. A later border of an answer replaces the snapshot of an earlier one
            and is not counted.
        restored: prompts that continued from a snapshot.
        evicted: snapshots evicted for others. Snapshots dropped with their pages are not counted.
        lost_pages: cached pages whose tokens were computed again, because no snapshot followed
            them.
    """

    held: int = 0
    saved: int = 0
    restored: int = 0
    evicted: int = 0
    lost_pages: int = 0


@dataclass
class EngineStats:
    """A snapshot of an engine's statistics: current use of slots and pages, and counters.

    The counters begin at 0 when the engine starts.
    """

    num_running: int  # sequences that run now
    num_waiting: int  # sequences that wait now
    num_slots: int  # slots in total
    num_pages: int  # pages in total, without the null page
    pages_in_use: int  # pages that sequences hold now
    num_steps: int  # committed steps
    prompt_tokens: int  # prompt tokens of accepted requests
    generation_tokens: int  # sampled tokens
    num_preemptions: int  # preemptions for lack of pages
    prefix_queries: int  # tokens looked up in the prefix cache
    prefix_hits: int  # tokens found in the prefix cache
    num_compiles: int  # programs that requests had to wait for. It is 0 unless there is a bug.
    num_compiles_behind: int  # programs compiled in the background
    num_programs_missing: int  # programs that will still be compiled in the background
    num_failed_steps: int  # failed steps that were computed again
    # For each device the rows that its experts computed. A row is a token of one expert. Empty
    # without `enable_expert_parallel`.
    expert_rows: tuple[int, ...] = ()
    memory: tuple[MemoryUse, ...] = ()  # of each kind of memory that belongs to layers
    snapshots: SnapshotStats | None = None  # None for a model without states
    # Pages that sequences hold by the name of their kind, for a model with several kinds of pages.
    pages_by_kind: dict[str, int] = field(default_factory=dict[str, int])
    weights_version: str = "0"
    num_weight_updates: int = 0


Read = Callable[[EngineStats], float]
Valued = tuple[str, float]
"""Description and value of a metric."""
# Metrics with vLLM's names: their descriptions, and functions that read them.
GAUGES: dict[str, tuple[str, Read]] = {
    "num_requests_running": ("Sequences running.", lambda s: s.num_running),
    "num_requests_waiting": ("Sequences waiting.", lambda s: s.num_waiting),
}
KV_CACHE_USAGE = "kv_cache_usage_perc"
"""The gauge of `memory_shares` that vLLM has too."""
COUNTERS: dict[str, tuple[str, Read]] = {
    "prompt_tokens": ("Prompt tokens taken in.", lambda s: s.prompt_tokens),
    "generation_tokens": ("Tokens drawn.", lambda s: s.generation_tokens),
    "num_preemptions": ("Sequences sent back to wait.", lambda s: s.num_preemptions),
    "prefix_cache_queries": ("Tokens looked up in the prefix cache.", lambda s: s.prefix_queries),
    "prefix_cache_hits": ("Tokens found in the prefix cache.", lambda s: s.prefix_hits),
}


# Counted per device. vLLM only logs the balance of the counts.
EXPERT_ROWS = (
    "expert_rows",
    "Rows, a token for one expert each, that a device's experts computed.",
)


WEIGHTS_VERSION = "weights_version_info", "The version of the weights, as a label."
WEIGHT_UPDATES = "weight_updates", "Updates of the weights since the start."
SNAPSHOTS = "state_snapshots"
"""Gauge of the snapshots that cached pages have, for models whose layers keep states."""


def snapshot_metrics(stats: EngineStats) -> tuple[dict[str, Valued], dict[str, Valued]]:
    """Return gauges and counters of snapshots by name, with their descriptions.

    They are empty for a model without states.
    """
    counts = stats.snapshots
    if counts is None:
        return {}, {}
    counters = {
        f"{SNAPSHOTS}_saved": ("Snapshots of states taken.", float(counts.saved)),
        f"{SNAPSHOTS}_restored": ("Prompts continued from a snapshot.", float(counts.restored)),
        f"{SNAPSHOTS}_evicted": ("Snapshots evicted for others.", float(counts.evicted)),
        f"{SNAPSHOTS}_lost_pages": (
            "Cached pages computed again because no snapshot followed them.",
            float(counts.lost_pages),
        ),
    }
    return {SNAPSHOTS: ("Snapshots of states that cached pages have.", counts.held)}, counters


def memory_shares(stats: EngineStats) -> dict[str, tuple[str, float]]:
    """Return a gauge of the used share, 0 to 1, for each kind of memory that belongs to layers.

    The result maps the name of a gauge, such as "kv_cache_usage_perc", to (description, share).
    """
    return {
        f"{_word(use)}_usage_perc": (
            f"Share of the {use.unit}s of {use.name} that sequences hold, 0 to 1.",
            use.in_use / max(use.count, 1),
        )
        for use in stats.memory
    }


def memory_units(stats: EngineStats) -> dict[str, tuple[str, float]]:
    """Return a gauge of the used pages or slots for each kind of memory that belongs to layers.

    The result maps the name of a gauge, such as "num_pages_in_use", to (description, number).
    """
    gauges: dict[str, tuple[str, float]] = {}
    for use in stats.memory:
        units = f"{use.unit}s" if use.name == PAGES else f"{_word(use)}_{use.unit}s"
        text = f"{use.unit.title()}s of {use.name} that sequences hold."
        gauges[f"num_{units}_in_use"] = text, use.in_use
    return gauges


def _word(use: MemoryUse) -> str:
    return use.name.lower().replace(" ", "_")


@dataclass
class Metric:
    """Base class of an engine's metrics: a name with prefix "vllm:" or "jaxserve:", and labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A metric that only grows, counted from the engine's start."""

    value: int


@dataclass
class Gauge(Metric):
    """A metric whose value can rise and fall, such as the number of running sequences."""

    value: float


@dataclass
class Histogram(Metric):
    """A metric with the number and sum of values, and cumulative counts by upper bound."""

    count: int
    sum: float
    buckets: dict[str, int]


def metric_values(stats: EngineStats, step_tokens: ValueCounts, model_name: str) -> list[Metric]:
    """Return an engine's gauges, counters and histogram of tokens per step as a list of Metric."""
    labels = {"model_name": model_name, "engine": "0"}
    buckets = {bound: int(count) for bound, count in step_tokens.cumulative()}
    metrics: list[Metric] = [
        Gauge(f"vllm:{name}", dict(labels), float(read(stats)))
        for name, (_, read) in GAUGES.items()
    ]
    metrics += [
        Gauge(f"{'vllm' if name == KV_CACHE_USAGE else 'jaxserve'}:{name}", dict(labels), share)
        for name, (_, share) in memory_shares(stats).items()
    ]
    gauges, counters = snapshot_metrics(stats)
    metrics += [
        Gauge(f"jaxserve:{name}", dict(labels), value) for name, (_, value) in gauges.items()
    ]
    metrics += [
        Counter(f"vllm:{name}", dict(labels), int(read(stats)))
        for name, (_, read) in COUNTERS.items()
    ]
    metrics += [
        Counter(f"jaxserve:{name}", dict(labels), int(value))
        for name, (_, value) in counters.items()
    ]
    metrics += [
        Counter(f"jaxserve:{EXPERT_ROWS[0]}", labels | {"device": str(device)}, count)
        for device, count in enumerate(stats.expert_rows)
    ]
    metrics.append(
        Gauge(f"jaxserve:{WEIGHTS_VERSION[0]}", labels | {"version": stats.weights_version}, 1.0)
    )
    updates = stats.num_weight_updates
    metrics.append(Counter(f"jaxserve:{WEIGHT_UPDATES[0]}", dict(labels), updates))
    name, count = "vllm:iteration_tokens_total", buckets["+Inf"]
    metrics.append(Histogram(name, dict(labels), count, step_tokens.sum, buckets))
    return metrics
