"""GET /metrics by the names of vLLM 0.33, /load, /server_info, and the dashboard of them."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.server.served.request_metrics import vllm_tokens
from scripts.lib.paths import ROOT
from tests.server.conftest import KEYS
from tests.support.live_server import Server

DASHBOARD = ROOT / "scripts" / "deploy" / "grafana.json"
LATENCY = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
BETWEEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
FIRST = (
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
TOKENS = "1 2 5 10 20 50 100 200 500"  # up to the 640 tokens of the longest sequence
# From vLLM 0.33's v1/metrics/loggers.py and buckets.py: the metrics of a text-only engine without
# adapters, speculation and transfers.
HISTOGRAMS = {
    "time_to_first_token_seconds": FIRST,
    "inter_token_latency_seconds": BETWEEN,
    "request_time_per_output_token_seconds": BETWEEN,
    "e2e_request_latency_seconds": LATENCY,
    "request_queue_time_seconds": LATENCY,
    "request_inference_time_seconds": LATENCY,
    "request_prefill_time_seconds": LATENCY,
    "request_decode_time_seconds": LATENCY,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_max_num_generation_tokens": TOKENS,
    "request_params_max_tokens": TOKENS,
    "request_prefill_kv_computed_tokens": TOKENS,
    "request_params_n": "1 2 5 10 20",
    "request_num_preemptions": "1 2 3 4 5 10 20",
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
}
BASE = {"model_name", "engine"}
COUNTERS = {
    "prefix_cache_queries": BASE,
    "prefix_cache_hits": BASE,
    "num_preemptions": BASE,
    "prompt_tokens": BASE,
    "prompt_tokens_cached": BASE,
    "prompt_tokens_by_source": BASE | {"source"},
    "prompt_tokens_cached_by_source": BASE | {"source"},
    "generation_tokens": BASE,
    "request_success": BASE | {"finished_reason"},
    "admission_rejections": {"model_name", "reason"},
}
GAUGES = {
    "num_requests_running": BASE,
    "num_requests_waiting": BASE,
    "num_requests_waiting_by_reason": BASE | {"reason"},
    "kv_cache_usage_perc": BASE,
}
PROCESS = {
    *("process_cpu_seconds", "process_resident_memory_bytes", "process_virtual_memory_bytes"),
    *("process_open_fds", "process_max_fds", "process_start_time_seconds"),
}
SAMPLE = re.compile(r'[a-z:_0-9]+(?:\{(?:\w+="[^"\\\n]*",?)*\})? (?:[\d.e+-]+|\+Inf|NaN)')


def families(server: Server) -> dict[str, Metric]:
    """Return /metrics by name, read by the library's own parser."""
    text = server.request("/metrics").body.decode()
    for line in text.splitlines():
        assert line.startswith("# ") or SAMPLE.fullmatch(line), line
    found = list(text_string_to_metric_families(text))
    by_name = {family.name: family for family in found}
    assert len(by_name) == len(found)
    return by_name


def value(found: dict[str, Metric], name: str, **labels: str) -> float:
    """Sum the samples of vLLM's metric with these labels."""
    samples = [sample for family in found.values() for sample in family.samples]
    chosen = [s for s in samples if s.name == f"vllm:{name}" and labels.items() <= s.labels.items()]
    assert chosen, name
    return sum(sample.value for sample in chosen)


def test_names_types_labels_and_buckets_are_vllms(server: Server) -> None:
    server.complete([5, 6, 7], 4, ignore_eos=True)
    found = families(server)
    for kind, names in (("counter", COUNTERS), ("gauge", GAUGES)):
        for name, labels in names.items():
            family = found[f"vllm:{name}"]
            assert family.type == kind and family.documentation
            for sample in family.samples:
                assert set(sample.labels) == labels, name
    for name, bounds in HISTOGRAMS.items():
        check_histogram(found[f"vllm:{name}"], [*map(float, bounds.split()), math.inf])
        check_histogram(found[f"jaxserve:{name}"])
    reasons = {s.labels["finished_reason"] for s in found["vllm:request_success"].samples}
    assert reasons == {"stop", "length", "abort", "error"}
    [info] = found["vllm:cache_config_info"].samples
    assert (info.labels["block_size"], info.labels["num_gpu_blocks"]) == ("16", "41")
    assert info.labels["kv_cache_size_tokens"] == "640"
    assert float(info.labels["kv_cache_max_concurrency"]) > 0
    assert info.labels["cache_dtype"] == "auto" and info.value == 1
    known = {f"vllm:{name}" for name in (*HISTOGRAMS, *COUNTERS, *GAUGES, "cache_config_info")}
    assert {name for name in found if name.startswith("vllm:")} == known
    assert found.keys() >= PROCESS


def check_histogram(family: Metric, bounds: list[float] | None = None) -> None:
    """Check that buckets ascend to the count of all samples, and have vLLM's bounds if given."""
    assert family.type == "histogram"
    buckets = [s for s in family.samples if s.name.endswith("_bucket")]
    got = [float(sample.labels["le"]) for sample in buckets]
    assert got == sorted(got) and got[-1] == math.inf
    assert bounds is None or got == bounds, family.name
    values = [sample.value for sample in buckets]
    assert values == sorted(values)
    [count] = [s.value for s in family.samples if s.name.endswith("_count")]
    [total] = [s.value for s in family.samples if s.name.endswith("_sum")]
    assert values[-1] == count and total >= 0
    assert set(buckets[0].labels) == {*BASE, "le"}


def test_buckets_of_tokens_end_at_the_longest_sequence() -> None:
    assert vllm_tokens(100) == (1, 2, 5, 10, 20, 50, 100)
    assert vllm_tokens(199) == (1, 2, 5, 10, 20, 50, 100)
    assert vllm_tokens(1) == (1,)


def test_a_request_is_counted_as_vllm_counts(server: Server) -> None:
    """Two completions of one prompt, the second of which finds its first page in the cache."""
    before = families(server)
    prompt = [*range(5, 25)]
    fields = {"n": 2, "temperature": 1, "seed": 3, "ignore_eos": True}
    assert server.complete(prompt, 6, **fields).status == 200
    assert server.complete(prompt, 6, ignore_eos=True).status == 200
    after = families(server)

    def change(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert change("prompt_tokens_total") == 40 and change("generation_tokens_total") == 18
    assert change("request_success_total", finished_reason="length") == 3
    assert change("request_success_total") == 3
    for name in ("prompt_tokens", "generation_tokens"):
        assert change(f"request_{name}_count") == 3
    assert change("request_prompt_tokens_sum") == 60
    assert change("request_generation_tokens_sum") == 18
    assert change("request_max_num_generation_tokens_count") == 2
    assert change("request_max_num_generation_tokens_sum") == 12
    assert (change("request_params_n_count"), change("request_params_n_sum")) == (2, 3)
    assert change("request_params_max_tokens_sum") == 18
    cached = change("prompt_tokens_cached_total")
    assert cached >= 16
    assert change("prompt_tokens_by_source_total", source="local_cache_hit") == cached
    assert change("prompt_tokens_by_source_total", source="local_compute") == 40 - cached
    assert change("request_prefill_kv_computed_tokens_sum") < 60
    # A step computes prompt tokens that are not cached, and draws tokens.
    computed = 60 - change("prefix_cache_hits_total") + 18
    assert change("iteration_tokens_total_sum") == computed
    assert change("iteration_tokens_total_count") >= 6
    times = {
        name: change(f"request_{name}_time_seconds_sum")
        for name in ("queue", "prefill", "decode", "inference")
    }
    assert all(seconds >= 0 for seconds in times.values())
    assert times["inference"] == pytest.approx(times["prefill"] + times["decode"])
    assert times["inference"] + times["queue"] <= change("e2e_request_latency_seconds_sum")
    assert change("request_time_per_output_token_seconds_sum") == pytest.approx(times["decode"] / 5)
    assert change("request_decode_time_seconds_count") == 3


def test_waiting_counts_as_queue_time_and_load(narrow: Server) -> None:
    """One slot: the second request's time in the queue is the first one's in the slot."""
    before = families(narrow)
    assert narrow.request("/load").json() == {"server_load": 0}
    first = narrow.open_drawing({"prompt": "a", "max_tokens": 60, "stream": True, "n": 1})
    second = narrow.open_stream({"prompt": "b", "max_tokens": 2, "stream": True})
    with first, second:
        narrow.wait_for("num_requests_waiting", lambda count: count == 1)
        since = time.monotonic()
        assert narrow.request("/load").json() == {"server_load": 2}
        waited = time.monotonic() - since
        found = families(narrow)
        assert value(found, "num_requests_waiting_by_reason", reason="capacity") == 1
        assert value(found, "num_requests_waiting_by_reason", reason="deferred") == 0
        assert value(found, "num_requests_running") == 1
        for stream in (first, second):
            drain(stream)
    after = families(narrow)

    def change(name: str) -> float:
        return value(after, name) - value(before, name)

    assert change("request_queue_time_seconds_count") == 2
    assert change("request_queue_time_seconds_sum") >= waited
    queue_and_slot = change("request_queue_time_seconds_sum")
    queue_and_slot += change("request_inference_time_seconds_sum")
    assert queue_and_slot <= change("e2e_request_latency_seconds_sum")
    assert narrow.request("/load").json() == {"server_load": 0}


def drain(stream: object) -> None:
    data = b""
    while b"[DONE]" not in data[-100:]:
        piece = stream.recv(1 << 16)  # type: ignore[attr-defined]
        assert piece
        data += piece


def test_refusals_are_counted_by_their_limit(narrow: Server) -> None:
    before = families(narrow)
    assert narrow.complete("a", 4, n=8).status == 429
    after = families(narrow)
    for reason, more in (("max_num_queued_reqs", 1), ("max_num_queued_tokens", 0)):
        name = "admission_rejections_total"
        assert value(after, name, reason=reason) - value(before, name, reason=reason) == more


def test_the_server_describes_itself(narrow: Server) -> None:
    answer = narrow.request("/server_info?config_format=json").json()
    assert set(answer) == {"vllm_config", "vllm_env", "system_env"}
    groups = answer["vllm_config"]
    assert groups["cache_config"]["block_size"] == 16
    assert groups["cache_config"]["num_gpu_blocks"] == 41
    assert groups["model_config"]["max_model_len"] == 640
    assert groups["scheduler_config"]["max_num_seqs"] == 1
    assert groups["parallel_config"]["tensor_parallel_size"] == 1
    assert answer["system_env"]["packages"].startswith("jax ")
    text = narrow.request("/server_info").body.decode()
    assert "max_num_seqs=1" in text and "block_size=16" in text
    assert not any(key in text for key in KEYS)
    answer = narrow.request("/server_info?config_format=xml")
    assert answer.status == 400 and answer.json()["error"]["param"] == "config_format"
    assert narrow.request("/server_info?model=other").status == 404


def test_what_sglangs_gateway_shows_of_a_model(narrow: Server) -> None:
    answers = [narrow.request(path).json() for path in ("/model_info", "/get_model_info")]
    assert answers[0] == answers[1]
    card = {"model_path": "demo_model", "tokenizer_path": "demo_model", "max_model_len": 640}
    kind = {"is_generation": True, "has_image_understanding": False}
    assert answers[0] == card | kind | {"has_audio_understanding": False}
    assert narrow.request("/get_model_info?model=other").status == 404
    assert narrow.request("/get_server_info").json() == narrow.request("/server_info").json()


# Names that routers read from /metrics, with the labels that they read of them.
SCRAPERS = {
    # Endpoint picker of llm-d (llm-d-router, August 2026, extractor/metrics/factories.go), and of
    # gateway-api-inference-extension, whose code it took over. lora_requests_info is optional.
    "llm-d": {
        "vllm:num_requests_waiting": set(),
        "vllm:num_requests_running": set(),
        "vllm:kv_cache_usage_perc": set(),
        "vllm:cache_config_info": {"block_size", "num_gpu_blocks"},
    },
    # SGLang's gateway, smg 1.13 (worker/monitor.rs), of workers that it takes for vLLM.
    "smg": {
        "vllm:kv_cache_usage_perc": set(),
        "vllm:num_requests_running": set(),
        "vllm:num_requests_waiting": set(),
    },
    # vLLM's production stack (vllm_router/stats/engine_stats.py), which reads besides four names
    # with gpu_ that vLLM itself has no longer, and takes them for 0.
    "production-stack": {"vllm:num_requests_running": set(), "vllm:num_requests_waiting": set()},
}


@pytest.mark.parametrize("scraper", SCRAPERS)
def test_what_routers_scrape_is_there(server: Server, scraper: str) -> None:
    found = families(server)
    for name, labels in SCRAPERS[scraper].items():
        [sample] = found[name].samples
        assert labels <= set(sample.labels) and sample.labels["model_name"] == "demo_model"
        assert all(sample.labels[label].isdigit() for label in labels)
        assert found[name].type == "gauge"
        if name.endswith("_perc"):
            assert 0 <= sample.value <= 1


def expressions() -> Iterator[str]:
    board = json.loads(DASHBOARD.read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]


def test_every_expression_of_the_dashboard_reads_a_metric_that_is_there(server: Server) -> None:
    server.complete("a", 2)
    names = {sample.name for family in families(server).values() for sample in family.samples}
    labels = {
        label
        for family in families(server).values()
        for sample in family.samples
        for label in sample.labels
    }
    found = list(expressions())
    assert len(found) > 20
    for text in found:
        read = re.findall(r"\b(?:vllm|jaxserve):\w+|\bprocess_\w+", text)
        assert read, text
        assert set(read) <= names, (text, set(read) - names)
        grouped = re.findall(r"by ?\(([^)]*)\)", text)
        used = {part.strip() for group in grouped for part in group.split(",")}
        used |= set(re.findall(r"(\w+)=~?\"", text))
        assert used - {"job", "instance"} <= labels, text


def test_the_dashboard_has_no_panel_upon_another() -> None:
    board = json.loads(DASHBOARD.read_text())
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
