"""Metrics of an engine as plain values, in the form of vLLM's `LLM.get_metrics`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.engine.metrics import EngineStats
from jaxserve.engine.metrics import Histogram as Counts

Read = Callable[[EngineStats], float]
# Names that vLLM has too: what they say, and where they are read.
GAUGES: dict[str, tuple[str, Read]] = {
    "num_requests_running": ("Sequences running.", lambda s: s.num_running),
    "num_requests_waiting": ("Sequences waiting.", lambda s: s.num_waiting),
    "kv_cache_usage_perc": (
        "Share of the pages of KV cache that sequences hold, 0 to 1.",
        lambda s: s.pages_in_use / max(s.num_pages, 1),
    ),
}
COUNTERS: dict[str, tuple[str, Read]] = {
    "prompt_tokens": ("Prompt tokens taken in.", lambda s: s.prompt_tokens),
    "generation_tokens": ("Tokens drawn.", lambda s: s.generation_tokens),
    "num_preemptions": ("Sequences sent back to wait.", lambda s: s.num_preemptions),
    "prefix_cache_queries": ("Tokens looked up in the prefix cache.", lambda s: s.prefix_queries),
    "prefix_cache_hits": ("Tokens found in the prefix cache.", lambda s: s.prefix_hits),
}


# Counted on each device; vLLM only logs how even the counts are.
EXPERT_ROWS = (
    "expert_rows",
    "Rows, a token for one expert each, that a device's experts computed.",
)


@dataclass
class Metric:
    """A metric's name, under vLLM's prefix, and its labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A count since the engine's start."""

    value: int


@dataclass
class Gauge(Metric):
    """A number that rises and falls."""

    value: float


@dataclass
class Histogram(Metric):
    """Counts of values by their upper bound, "+Inf" among them."""

    count: int
    sum: float
    buckets: dict[str, int]


def metric_values(stats: EngineStats, step_tokens: Counts, model_name: str) -> list[Metric]:
    """Return an engine's counts.

    Args:
        stats: of the engine.
        step_tokens: tokens of each of its steps.
        model_name: a label of each.
    """
    labels = {"model_name": model_name, "engine": "0"}
    buckets = {bound: int(count) for bound, count in step_tokens.cumulative()}
    return [
        *(
            Gauge(f"vllm:{name}", dict(labels), float(read(stats)))
            for name, (_, read) in GAUGES.items()
        ),
        *(
            Counter(f"vllm:{name}", dict(labels), int(read(stats)))
            for name, (_, read) in COUNTERS.items()
        ),
        *(
            Counter(f"jaxserve:{EXPERT_ROWS[0]}", labels | {"device": str(device)}, count)
            for device, count in enumerate(stats.expert_rows)
        ),
        Histogram(
            "vllm:iteration_tokens_total",
            dict(labels),
            buckets["+Inf"],
            step_tokens.sum,
            buckets,
        ),
    ]
