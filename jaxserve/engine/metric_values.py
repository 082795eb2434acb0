"""Metrics of an engine in the form of vLLM's `LLM.get_metrics`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.engine.metrics import EngineStats, MemoryUse, ValueCounts
from jaxserve.execution.state import PAGES

Read = Callable[[EngineStats], float]
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


def memory_shares(stats: EngineStats) -> dict[str, tuple[str, float]]:
    """Return a gauge for each kind of memory of layers: its description, and its share in use."""
    return {
        f"{_word(use)}_usage_perc": (
            f"Share of the {use.unit}s of {use.name} that sequences hold, 0 to 1.",
            use.in_use / max(use.count, 1),
        )
        for use in stats.memory
    }


def memory_units(stats: EngineStats) -> dict[str, tuple[str, float]]:
    """Return a gauge for each kind of memory of layers: its description, and its units in use."""
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
    """A metric with vLLM's prefix in its name, and labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A counter since the engine's start."""

    value: int


@dataclass
class Gauge(Metric):
    """A number that can rise and fall."""

    value: float


@dataclass
class Histogram(Metric):
    """Cumulative counts of values by upper bound, including "+Inf"."""

    count: int
    sum: float
    buckets: dict[str, int]


def metric_values(stats: EngineStats, step_tokens: ValueCounts, model_name: str) -> list[Metric]:
    """Return the metrics of an engine.

    Args:
        stats: the statistics of the engine.
        step_tokens: the histogram of tokens per step.
        model_name: a label of all metrics.
    """
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
    metrics += [
        Counter(f"vllm:{name}", dict(labels), int(read(stats)))
        for name, (_, read) in COUNTERS.items()
    ]
    metrics += [
        Counter(f"jaxserve:{EXPERT_ROWS[0]}", labels | {"device": str(device)}, count)
        for device, count in enumerate(stats.expert_rows)
    ]
    name, count = "vllm:iteration_tokens_total", buckets["+Inf"]
    metrics.append(Histogram(name, dict(labels), count, step_tokens.sum, buckets))
    return metrics
