"""Endpoint GET /metrics: vLLM's names, with the prefix `jaxserve:`, in Prometheus's format."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.engine.metrics import EngineStats
from jaxserve.server.served.models import Models, ServedModel
from jaxserve.server.served.request_metrics import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# No label comes from a request, so that no request can add a time series.
_LABELS = ["model_name", "engine"]
Read = Callable[[EngineStats], float]

GAUGES: dict[str, tuple[str, Read]] = {
    "num_requests_running": ("Sequences running.", lambda s: s.num_running),
    "num_requests_waiting": ("Sequences waiting.", lambda s: s.num_waiting),
    "kv_cache_usage_perc": (
        "Share of the pages of KV cache that sequences hold, 0 to 1.",
        lambda s: s.pages_in_use / max(s.num_pages, 1),
    ),
    "engine_programs_missing": (
        "Programs that would fit better and are still to come.",
        lambda s: s.num_programs_missing,
    ),
    "num_pages_in_use": ("Pages of KV cache that sequences hold.", lambda s: s.pages_in_use),
}
COUNTERS: dict[str, tuple[str, Read]] = {
    "prompt_tokens": ("Prompt tokens taken in.", lambda s: s.prompt_tokens),
    "generation_tokens": ("Tokens drawn.", lambda s: s.generation_tokens),
    "num_preemptions": ("Sequences sent back to wait.", lambda s: s.num_preemptions),
    "prefix_cache_queries": ("Tokens looked up in the prefix cache.", lambda s: s.prefix_queries),
    "prefix_cache_hits": ("Tokens found in the prefix cache.", lambda s: s.prefix_hits),
    "engine_steps": ("Steps computed.", lambda s: s.num_steps),
    "engine_failed_steps": ("Steps lost and computed again.", lambda s: s.num_failed_steps),
    "engine_compiles": ("Compilations that requests waited for.", lambda s: s.num_compiles),
    "engine_compiles_behind": (
        "Programs compiled beside the engine, for which no request waited.",
        lambda s: s.num_compiles_behind,
    ),
}
HISTOGRAMS: dict[str, tuple[str, Callable[[ServedModel], Histogram]]] = {
    "time_to_first_token_seconds": (
        "From a request's arrival to its first token.",
        lambda m: m.request_metrics.time_to_first_token,
    ),
    "inter_token_latency_seconds": (
        "Between tokens of a request.",
        lambda m: m.request_metrics.inter_token_latency,
    ),
    "e2e_request_latency_seconds": (
        "From a completion's arrival to its end.",
        lambda m: m.request_metrics.e2e_latency,
    ),
    "request_prompt_tokens": (
        "Prompt tokens of a request.",
        lambda m: m.request_metrics.prompt_tokens,
    ),
    "request_generation_tokens": (
        "Tokens drawn for a completion.",
        lambda m: m.request_metrics.generation_tokens,
    ),
}


class _Snapshot(Collector):
    """Collector of all counts of all models. It waits for no engine, so a hung one is visible."""

    def __init__(self, models: Models) -> None:
        self._models = models.all

    def collect(self) -> Iterator[Metric]:
        stats = [(model, model.llm.stats_now()) for model in self._models]
        for name, (text, read) in GAUGES.items():
            gauge = GaugeMetricFamily(f"jaxserve:{name}", text, labels=_LABELS)
            for model, counts in stats:
                gauge.add_metric([model.name, "0"], read(counts))
            yield gauge
        paused = GaugeMetricFamily(
            "jaxserve:num_requests_paused", "Requests waiting for their reader.", labels=_LABELS
        )
        for model in self._models:
            num_paused = sum(generation.is_paused for generation in model.active)
            paused.add_metric([model.name, "0"], num_paused)
        yield paused
        for name, (text, read) in COUNTERS.items():
            counter = CounterMetricFamily(f"jaxserve:{name}", text, labels=_LABELS)
            for model, counts in stats:
                counter.add_metric([model.name, "0"], read(counts))
            yield counter
        for name, (text, find) in HISTOGRAMS.items():
            family = HistogramMetricFamily(f"jaxserve:{name}", text, labels=_LABELS)
            for model in self._models:
                histogram = find(model)
                family.add_metric([model.name, "0"], histogram.cumulative(), histogram.sum)
            yield family
        yield from self._requests()

    def _requests(self) -> Iterator[Metric]:
        labels = [*_LABELS, "finished_reason"]
        ended = CounterMetricFamily(
            "jaxserve:request_success", "Completions that ended, by reason.", labels=labels
        )
        refused = CounterMetricFamily(
            "jaxserve:request_refused", "Requests answered 429.", labels=_LABELS
        )
        info = GaugeMetricFamily(
            "jaxserve:cache_config_info",
            "The KV cache, as labels.",
            labels=[*_LABELS, "block_size", "num_gpu_blocks"],
        )
        for model in self._models:
            for reason, count in sorted(model.request_metrics.endings.items()):
                ended.add_metric([model.name, "0", reason], count)
            refused.add_metric([model.name, "0"], model.admission.num_refused)
            llm = model.llm
            sizes = [str(llm.config.block_size), str(llm.num_pages)]
            info.add_metric([model.name, "0", *sizes], 1)
        yield from (ended, refused, info)


async def metrics(request: Request) -> Response:
    """Answer with all counts."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(request.app.state.served.models))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE)
