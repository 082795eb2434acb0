"""Report of a scene: the metrics of `jaxserve bench serve`, refusals, the client, and a plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.commands.bench import report
from jaxserve.commands.bench.outcome import Outcome, Run
from jaxserve.commands.bench.report import METRICS, samples, statistics_of

LEAST_MS = 0.1  # the left end of a logarithmic axis of milliseconds
BLUE, GREEN, ORANGE = "#2a78d6", "#1baf7a", "#eb6834"


def each_second(outcomes: Iterable[Outcome]) -> np.ndarray:
    """Count output tokens in each second of a run.

    An event without a number of tokens counts as an equal part of the server's count.
    """
    counts = np.zeros(1)
    for outcome in outcomes:
        if not (outcome.ttft or outcome.itls):
            continue
        times = outcome.sent + outcome.ttft + np.cumsum([0.0, *outcome.itls])
        tokens = np.array(outcome.event_tokens or [1.0] * len(times))
        tokens = tokens * (outcome.output_tokens / tokens.sum())
        counts = np.pad(counts, (0, max(0, int(times[-1]) + 1 - len(counts))))
        np.add.at(counts, times.astype(int), tokens)
    return counts


def summarize(run: Run, percentiles: Sequence[float]) -> dict[str, Any]:
    """Summarize a run as `jaxserve bench serve` does, with refused requests (429) counted apart.

    Signs of a client that is too slow are added: its share of a core, and how late it sent.
    """
    result = report.summarize(run, tuple(METRICS), percentiles, {})
    refused = [outcome for outcome in run.outcomes if outcome.is_refused]
    errors = [outcome.error for outcome in run.outcomes if outcome.error and not outcome.is_refused]
    result |= {"failed": len(errors), "refused": len(refused)}
    if refused:
        milliseconds = np.array([outcome.latency for outcome in refused]) * 1e3
        result |= statistics_of(milliseconds, "refused", percentiles)
    lags = np.array([outcome.lag for outcome in run.outcomes] or [0.0]) * 1e3
    events = sum(len(outcome.itls) + 1 for outcome in run.outcomes)
    return result | {
        "failures": dict(Counter(errors).most_common(10)),
        "client_cpu_cores": run.cpu_seconds / run.duration,
        "client_cpu_us_per_event": run.cpu_seconds / max(1, events) * 1e6,
        "client_p99_send_lag_ms": float(np.percentile(lags, 99)),
    }


def show(result: dict[str, Any]) -> None:
    """Print the table of `jaxserve bench serve`, refusals, the client, and failures."""
    print(report.table(result, tuple(METRICS), None, float("inf")))
    latency = f", in {result['p99_refused_ms']:.2f} ms (p99)" if result["refused"] else ""
    print(f"Refused requests (429): {result['refused']}{latency}")
    print(
        f"Client: {result['client_cpu_cores']:.2f} cores; sent "
        f"{result['client_p99_send_lag_ms']:.2f} ms late (p99)"
    )
    for text, count in result["failures"].items():
        print(f"failed, {count} times: {text}")


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
            # Tokens of one launch arrive at once: a gap of 0 ms still has its place.
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
