"""GET /metrics: vLLM's names, with the prefix `jaxserve:`, in Prometheus's format."""

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
# Every label is one of ours: a request cannot add a time series.
_LABELS = ["model_name", "engine"]
Read = Callable[[EngineStats], float]

GAUGES: dict[str, tuple[str, Read]] = {
    "num_requests_running": ("Sequences running.", lambda s: s.num_running),
    "num_requests_waiting": ("Sequences waiting.", lambda s: s.num_waiting),
    "kv_cache_usage_perc": (
        "Share of the pages of KV cache that sequences hold, 0 to 1.",
        lambda s: s.pages_in_use / max(s.num_pages, 1),
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
    "engine_compiles": ("Programs compiled after the start.", lambda s: s.num_compiles),
}
HISTOGRAMS: dict[str, tuple[str, Callable[[ServedModel], Histogram]]] = {
    "time_to_first_token_seconds": (
        "From a request's arrival to its first token.",
        lambda m: m.observed.time_to_first_token,
    ),
    "inter_token_latency_seconds": (
        "Between tokens of a request.",
        lambda m: m.observed.inter_token_latency,
    ),
    "e2e_request_latency_seconds": (
        "From a completion's arrival to its end.",
        lambda m: m.observed.e2e_latency,
    ),
    "request_prompt_tokens": ("Prompt tokens of a request.", lambda m: m.observed.prompt_tokens),
    "request_generation_tokens": (
        "Tokens drawn for a completion.",
        lambda m: m.observed.generation_tokens,
    ),
}


class _Snapshot(Collector):
    """Reads all counts of all models when asked. Waits for no engine: one that hangs is seen."""

    def __init__(self, models: Models) -> None:
        self._models = models.all

    def collect(self) -> Iterator[Metric]:
        stats = [(model, model.llm.thread.engine.stats()) for model in self._models]
        for name, (text, read) in GAUGES.items():
            gauge = GaugeMetricFamily(f"jaxserve:{name}", text, labels=_LABELS)
            for model, one in stats:
                gauge.add_metric([model.name, "0"], read(one))
            yield gauge
        paused = GaugeMetricFamily(
            "jaxserve:num_requests_paused", "Requests waiting for their reader.", labels=_LABELS
        )
        for model in self._models:
            paused.add_metric([model.name, "0"], sum(one.is_paused for one in model.active))
        yield paused
        for name, (text, read) in COUNTERS.items():
            counter = CounterMetricFamily(f"jaxserve:{name}", text, labels=_LABELS)
            for model, one in stats:
                counter.add_metric([model.name, "0"], read(one))
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
            for reason, count in sorted(model.observed.endings.items()):
                ended.add_metric([model.name, "0", reason], count)
            refused.add_metric([model.name, "0"], model.admission.num_refused)
            engine = model.llm.thread.engine
            pages = str(engine.runner.num_pages)
            info.add_metric([model.name, "0", str(engine.config.block_size), pages], 1)
        yield from (ended, refused, info)


async def metrics(request: Request) -> Response:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(request.app.state.served.models))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE)
