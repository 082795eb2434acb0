"""Metrics of an engine as plain values, in the form of vLLM's `LLM.get_metrics`."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.engine.metrics import EngineStats
from jaxserve.engine.metrics import Histogram as Counts


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
    gauges = {
        "num_requests_running": float(stats.num_running),
        "num_requests_waiting": float(stats.num_waiting),
        "kv_cache_usage_perc": stats.pages_in_use / max(1, stats.num_pages),
    }
    counters = {
        "num_preemptions": stats.num_preemptions,
        "prefix_cache_queries": stats.prefix_queries,
        "prefix_cache_hits": stats.prefix_hits,
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generation_tokens,
    }
    buckets = {bound: int(count) for bound, count in step_tokens.cumulative()}
    return [
        *(Gauge(f"vllm:{name}", dict(labels), value) for name, value in gauges.items()),
        *(Counter(f"vllm:{name}", dict(labels), value) for name, value in counters.items()),
        Histogram(
            "vllm:iteration_tokens_total",
            dict(labels),
            buckets["+Inf"],
            step_tokens.sum,
            buckets,
        ),
    ]
