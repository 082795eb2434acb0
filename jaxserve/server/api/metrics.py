"""Endpoint GET /metrics in Prometheus's format, with jaxserve's metrics also under vLLM's names.

A metric that vLLM 0.33 has too (its `v1/metrics/loggers.py`) appears as `jaxserve:NAME` and as
`vllm:NAME`, both with vLLM's labels. Histograms under vLLM's name have vLLM's buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.engine import metrics as engine_metrics
from jaxserve.server.served.models import Models, ServedModel

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Labels never hold values of requests, which could otherwise add any number of time series.
_LABELS = ["model_name", "engine"]
_SIZES = ["num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"]
Samples = Iterable[tuple[list[str], float]]

_OWN_GAUGES: dict[str, tuple[str, engine_metrics.Read]] = {
    "engine_programs_missing": (
        "Programs that would fit better and are still to come.",
        lambda s: s.num_programs_missing,
    ),
}
_OWN_COUNTERS: dict[str, tuple[str, engine_metrics.Read]] = {
    "engine_steps": ("Steps computed.", lambda s: s.num_steps),
    "engine_failed_steps": ("Steps lost and computed again.", lambda s: s.num_failed_steps),
    "engine_compiles": ("Compilations that requests waited for.", lambda s: s.num_compiles),
    "engine_compiles_behind": (
        "Programs compiled beside the engine, for which no request waited.",
        lambda s: s.num_compiles_behind,
    ),
    engine_metrics.WEIGHT_UPDATES[0]: (
        engine_metrics.WEIGHT_UPDATES[1],
        lambda s: s.num_weight_updates,
    ),
}
_OWN = _OWN_GAUGES.keys() | _OWN_COUNTERS.keys()


class _Snapshot(Collector):
    """Collector of the metrics of all models for prometheus_client.

    It waits for no engine, so that metrics show an engine that hangs.
    """

    def __init__(self, models: Models) -> None:
        self._models = models.all

    def collect(self) -> Iterator[Metric]:
        stats = [([model.name, "0"], model.llm.stats_now()) for model in self._models]
        for name, (text, read) in (engine_metrics.GAUGES | _OWN_GAUGES).items():
            samples = [(labels, read(counts)) for labels, counts in stats]
            yield from _families(GaugeMetricFamily, name, text, samples, is_own=name in _OWN)
        yield from _memory(stats)
        yield from _snapshots(stats)
        for name, (text, read) in (engine_metrics.COUNTERS | _OWN_COUNTERS).items():
            samples = [(labels, read(counts)) for labels, counts in stats]
            yield from _families(CounterMetricFamily, name, text, samples, is_own=name in _OWN)
        versions = [([*labels, counts.weights_version], 1.0) for labels, counts in stats]
        yield from _families(
            GaugeMetricFamily, *engine_metrics.WEIGHTS_VERSION, versions, "version", is_own=True
        )
        rows = [
            ([*labels, str(device)], float(count))
            for labels, counts in stats
            for device, count in enumerate(counts.expert_rows)
        ]
        if rows:
            yield from _families(
                CounterMetricFamily, *engine_metrics.EXPERT_ROWS, rows, "device", is_own=True
            )
        columns = zip(*(model.request_metrics.histograms for model in self._models), strict=True)
        for column in columns:
            name, text = column[0].name, column[0].text
            yield self._histogram(f"jaxserve:{name}", text, [(h, h.ours) for h in column])
            yield self._histogram(f"vllm:{name}", text, [(h, h.theirs) for h in column])
        steps = [(model.llm.step_tokens, engine_metrics.STEP_TOKENS) for model in self._models]
        for prefix in ("jaxserve", "vllm"):
            text = "Tokens of a step, of prompts and of answers."
            yield self._histogram(f"{prefix}:iteration_tokens_total", text, steps)
        yield from self._waiting(stats)
        yield from self._requests()
        yield from self._prompt_tokens()
        yield self._cache_config("jaxserve")
        yield self._cache_config("vllm")

    def _histogram(
        self,
        name: str,
        text: str,
        rows: Sequence[tuple[engine_metrics.ValueCounts, Iterable[float]]],
    ) -> Metric:
        # A row has the histogram of a model, and the bounds of its buckets.
        family = HistogramMetricFamily(name, text, labels=_LABELS)
        for model, (histogram, bounds) in zip(self._models, rows, strict=True):
            family.add_metric([model.name, "0"], histogram.cumulative(bounds), histogram.sum)
        return family

    def _waiting(
        self, stats: list[tuple[list[str], engine_metrics.EngineStats]]
    ) -> Iterator[Metric]:
        # vLLM defers requests for other reasons than capacity, and jaxserve does not.
        samples: list[tuple[list[str], float]] = []
        for labels, counts in stats:
            samples += [([*labels, "capacity"], counts.num_waiting), ([*labels, "deferred"], 0)]
        name, text = "num_requests_waiting_by_reason", "Sequences waiting, by what for."
        yield from _families(GaugeMetricFamily, name, text, samples, "reason")
        paused = [
            ([model.name, "0"], float(sum(generation.is_paused for generation in model.active)))
            for model in self._models
        ]
        text = "Requests waiting for their reader."
        yield from _families(GaugeMetricFamily, "num_requests_paused", text, paused, is_own=True)

    def _requests(self) -> Iterator[Metric]:
        ended: list[tuple[list[str], float]] = []
        refused: list[tuple[list[str], float]] = []
        rejected: list[tuple[list[str], float]] = []
        for model in self._models:
            for reason, count in sorted(model.request_metrics.endings.items()):
                ended.append(([model.name, "0", reason], count))
            refused.append(([model.name, "0"], model.admission.num_refused))
            for reason, count in model.admission.refusals.items():
                rejected.append(([model.name, reason], count))
        text = "Completions that ended, by reason."
        yield from _families(CounterMetricFamily, "request_success", text, ended, "finished_reason")
        text = "Requests answered 429."
        yield from _families(CounterMetricFamily, "request_refused", text, refused, is_own=True)
        family = CounterMetricFamily(
            "vllm:admission_rejections",
            "Requests answered 429, by the limit of the queue.",
            labels=["model_name", "reason"],
        )
        for labels, count in rejected:
            family.add_metric(labels, count)
        yield family

    def _prompt_tokens(self) -> Iterator[Metric]:
        sources: list[tuple[list[str], float]] = []
        cached: list[tuple[list[str], float]] = []
        tiers: list[tuple[list[str], float]] = []
        for model in self._models:
            labels, counts = [model.name, "0"], model.request_metrics
            sources.append(([*labels, "local_compute"], counts.prompt_computed))
            sources.append(([*labels, "local_cache_hit"], counts.prompt_cached))
            cached.append((labels, counts.prompt_cached))
            tiers.append(([*labels, "device"], counts.prompt_cached))
        rows = (
            ("prompt_tokens_by_source", "Prompt tokens, by where from.", sources, "source"),
            ("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", cached, None),
            ("prompt_tokens_cached_by_source", "The same, by where they lay.", tiers, "source"),
        )
        for name, text, samples, label in rows:
            yield from _families(CounterMetricFamily, name, text, samples, label)

    def _cache_config(self, prefix: str) -> Metric:
        fields = ["block_size", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization"]
        info = GaugeMetricFamily(
            f"{prefix}:cache_config_info",
            "The KV cache, as labels.",
            labels=[*_LABELS, *fields, *_SIZES],
        )
        for model in self._models:
            config = model.llm.config
            values = (
                config.block_size,
                config.kv_cache_dtype,
                config.enable_prefix_caching,
                config.gpu_memory_utilization,
                *_cache_sizes(model),
            )
            info.add_metric([model.name, "0", *map(str, values)], 1)
        return info


def _memory(stats: list[tuple[list[str], engine_metrics.EngineStats]]) -> Iterator[Metric]:
    samples: dict[tuple[str, str], list[tuple[list[str], float]]] = {}
    for labels, counts in stats:
        gauges = engine_metrics.memory_shares(counts) | engine_metrics.memory_units(counts)
        for name, (text, value) in gauges.items():
            samples.setdefault((name, text), []).append((labels, value))
    for (name, text), rows in samples.items():
        is_own = name != engine_metrics.KV_CACHE_USAGE
        yield from _families(GaugeMetricFamily, name, text, rows, is_own=is_own)
    by_kind: Samples = [
        ([*labels, kind], count)
        for labels, counts in stats
        for kind, count in counts.pages_by_kind.items()
    ]
    if by_kind:
        text = "Pages that sequences hold, by the kind of layers that they are of."
        name = "num_pages_in_use_by_kind"
        yield from _families(GaugeMetricFamily, name, text, by_kind, "kind", is_own=True)


def _snapshots(stats: list[tuple[list[str], engine_metrics.EngineStats]]) -> Iterator[Metric]:
    for index, kind in enumerate((GaugeMetricFamily, CounterMetricFamily)):
        samples: dict[tuple[str, str], list[tuple[list[str], float]]] = {}
        for labels, counts in stats:
            for name, (text, value) in engine_metrics.snapshot_metrics(counts)[index].items():
                samples.setdefault((name, text), []).append((labels, value))
        for (name, text), rows in samples.items():
            yield from _families(kind, name, text, rows, is_own=True)


def _cache_sizes(model: ServedModel) -> tuple[int, int, float]:
    tokens = model.llm.cache_tokens
    return model.llm.num_pages, tokens, round(tokens / model.limits.max_model_len, 2)


def _families(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    samples: Samples,
    label: str | None = None,
    *,
    is_own: bool = False,
) -> Iterator[Metric]:
    """Yield a metric under jaxserve's name, and under vLLM's name too unless `is_own` is set.

    Args:
        kind: class of the metric, a gauge or a counter.
        name: name of the metric without a prefix.
        text: description of the metric.
        samples: pairs of label values and a number.
        label: name of a label besides the model's name and the engine, or None.
        is_own: whether vLLM has no such metric.
    """
    labels = _LABELS if label is None else [*_LABELS, label]
    for prefix in ("jaxserve",) if is_own else ("jaxserve", "vllm"):
        family = kind(f"{prefix}:{name}", text, labels=labels)
        for values, value in samples:
            family.add_metric(values, value)
        yield family


async def metrics(request: Request) -> Response:
    """Endpoint `GET /metrics`: answer with the metrics of all models and of the process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(request.app.state.served.models))
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return Response(generate_latest(registry), media_type=CONTENT_TYPE)
