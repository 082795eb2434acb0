"""The report half of bench_serving: metrics by the names that `vllm bench serve` gives them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.commands.bench import report
from jaxserve.commands.bench.outcome import Outcome, Run
from jaxserve.commands.bench.report import METRICS, WIDTH, is_good, samples, statistics_of

LEAST_MS = 0.1  # the left end of a logarithmic axis of milliseconds
BLUE, GREEN, ORANGE = "#2a78d6", "#1baf7a", "#eb6834"


def token_times(outcomes: Iterable[Outcome]) -> tuple[np.ndarray, np.ndarray]:
    """Gather seconds from the start of each event with tokens, and its number of tokens."""
    came = [outcome for outcome in outcomes if outcome.ttft or outcome.itls]
    times = [outcome.sent + outcome.ttft + np.cumsum([0.0, *outcome.itls]) for outcome in came]
    tokens = [_event_tokens(outcome) for outcome in came]
    return np.concatenate([[], *times]), np.concatenate([[], *tokens])


def _event_tokens(outcome: Outcome) -> np.ndarray:
    """Count tokens of each event; where they have no number, the server's count in equal parts."""
    tokens = np.array(outcome.event_tokens or [1.0] * (len(outcome.itls) + 1))
    return tokens * (outcome.output_tokens / tokens.sum())


def each_second(outcomes: Iterable[Outcome]) -> np.ndarray:
    """Count output tokens in each second of a run."""
    times, tokens = token_times(outcomes)
    return np.bincount(times.astype(int), tokens) if len(times) else np.zeros(1)


def most_at_once(outcomes: Iterable[Outcome]) -> int:
    """Count the most requests that were in flight together, refused ones apart."""
    spans = [
        (outcome.sent, outcome.sent + outcome.latency)
        for outcome in outcomes
        if not outcome.is_refused
    ]
    edges = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    return int(max(np.cumsum([change for _, change in edges]), default=0))


def summarize(
    run: Run,
    metrics: Sequence[str] = tuple(METRICS),
    percentiles: Sequence[float] = (99,),
    objectives: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Summarize the results of a run; throughputs are per second of the whole run."""
    outcomes, duration = run.outcomes, run.duration
    done = [outcome for outcome in outcomes if outcome.is_success]
    refused = [outcome for outcome in outcomes if outcome.is_refused]
    inputs, outputs = sum(o.input_tokens for o in done), sum(o.output_tokens for o in done)
    failures = [outcome.error for outcome in outcomes if outcome.error and not outcome.is_refused]
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(failures),
        "refused": len(refused),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / duration,
        "request_goodput": None,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "max_output_tokens_per_s": float(each_second(done).max()),
        "max_concurrent_requests": most_at_once(outcomes),
    }
    if objectives:
        result["goodput_slo_ms"] = objectives
        result["request_goodput"] = sum(is_good(outcome, objectives) for outcome in done) / duration
    values = samples(outcomes)
    for name in metrics:
        result |= statistics_of(values[name], name, percentiles)
    if refused:
        milliseconds = np.array([outcome.latency for outcome in refused]) * 1e3
        result |= statistics_of(milliseconds, "refused", sorted({50, 99, *percentiles}))
    result["failures"] = dict(Counter(failures).most_common(10))
    return result | _client(run)


def _client(run: Run) -> dict[str, float]:
    """Measure signs of a client that is too slow: its share of a core, and how late it sent."""
    lags = np.array([outcome.lag for outcome in run.outcomes] or [0.0]) * 1e3
    events = sum(len(outcome.itls) + 1 for outcome in run.outcomes)
    return {
        "client_cpu_cores": run.cpu_seconds / run.duration,
        "client_cpu_us_per_event": run.cpu_seconds / max(1, events) * 1e6,
        "client_p99_send_lag_ms": float(np.percentile(lags, 99)),
    }


def details(run: Run) -> dict[str, Any]:
    """List an entry for each request, for `--save-detailed`; times in seconds."""
    return report.details(run) | {"statuses": [outcome.status for outcome in run.outcomes]}


def show(result: dict[str, Any], metrics: Sequence[str] = tuple(METRICS)) -> None:
    """Print results as `vllm bench serve` does."""

    def line(text: str, value: Any) -> None:
        shown = f"{value:.2f}" if isinstance(value, float) else str(value)
        print(f"{text + ':':<40} {shown:<10}")

    print(f"{' Serving Benchmark Result ':=^{WIDTH}}")
    line("Successful requests", result["completed"])
    line("Failed requests", result["failed"])
    line("Refused requests (429)", result["refused"])
    line("Benchmark duration (s)", result["duration"])
    line("Total input tokens", result["total_input_tokens"])
    line("Total generated tokens", result["total_output_tokens"])
    line("Request throughput (req/s)", result["request_throughput"])
    if result["request_goodput"] is not None:
        line("Request goodput (req/s)", result["request_goodput"])
    line("Output token throughput (tok/s)", result["output_throughput"])
    line("Peak output token throughput (tok/s)", result["max_output_tokens_per_s"])
    line("Peak concurrent requests", result["max_concurrent_requests"])
    line("Total token throughput (tok/s)", result["total_token_throughput"])
    titles = {name: METRICS[name] for name in metrics} | {"refused": "Answers 429"}
    for name, title in titles.items():
        keys = [key for key in result if key.endswith(f"_{name}_ms")]
        if keys:
            print(f"{title:-^{WIDTH}}")
        for key in keys:
            line(f"{key.partition('_')[0].capitalize()} {name.upper()} (ms)", result[key])
    print(f"{'Client':-^{WIDTH}}")
    line("CPU of the client (cores)", result["client_cpu_cores"])
    line("P99 lateness of sending (ms)", result["client_p99_send_lag_ms"])
    print("=" * WIDTH)
    for text, count in result["failures"].items():
        print(f"failed, {count} times: {text}", file=sys.stderr)


def plot(runs: dict[str, Run], path: Path, title: str) -> None:
    """Plot throughput over time, and the distributions of TTFT and ITL, of one or more runs."""
    # Imported here: only plots need it.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), constrained_layout=True)
    for (name, run), color in zip(runs.items(), (BLUE, ORANGE, GREEN), strict=False):
        counts = each_second(run.outcomes)
        axes[0].plot(np.arange(len(counts)) + 0.5, counts, color=color, label=name)
        values = samples(run.outcomes)
        for axis, metric in zip(axes[1:], ("ttft", "itl"), strict=True):
            # Tokens of one launch arrive at once: a gap of nothing still has its place.
            ordered = np.maximum(np.sort(values[metric]), LEAST_MS)
            if len(ordered):
                share = np.arange(1, len(ordered) + 1) / len(ordered)
                axis.plot(ordered, share, color=color, label=name)
    axes[0].set(xlabel="seconds", ylabel="output tokens a second", ylim=(0, None))
    axes[1].set(xlabel="time to first token, ms", ylabel="share of requests", ylim=(0, 1))
    axes[2].set(xlabel="inter-token latency, ms", ylabel="share of gaps", ylim=(0, 1))
    for axis in axes[1:]:
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter("")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    if len(runs) > 1:
        axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
