"""The report of a load: metrics, table and file with the names of `vllm bench serve`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxserve.commands.bench.outcome import Outcome, Run

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
WIDTH = 50


def tpot(outcome: Outcome) -> float:
    """Return a request's mean seconds per output token after the first, or 0 below two tokens."""
    if outcome.output_tokens < 2:
        return 0.0
    return (outcome.latency - outcome.ttft) / (outcome.output_tokens - 1)


def samples(outcomes: Iterable[Outcome]) -> dict[str, np.ndarray]:
    """Return the latency values of all successful requests by metric, in milliseconds.

    The array of "itl" has a value for each gap between events. The arrays of "ttft", "tpot" and
    "e2el" have a value for each request.
    """
    done = [outcome for outcome in outcomes if outcome.is_success]
    seconds = {
        "ttft": [outcome.ttft for outcome in done if outcome.output_tokens],
        "tpot": [tpot(outcome) for outcome in done if outcome.output_tokens > 1],
        "itl": [gap for outcome in done for gap in outcome.itls],
        "e2el": [outcome.latency for outcome in done],
    }
    return {name: np.array(values) * 1e3 for name, values in seconds.items()}


def statistics_of(values: np.ndarray, name: str, percentiles: Sequence[float]) -> dict[str, float]:
    """Return mean, median, standard deviation and percentiles of a metric's values in milliseconds.

    The result is a dict with names like `p99_ttft_ms`, where `name` is "ttft". Without values all
    are 0.
    """
    if not len(values):
        values = np.zeros(1)
    table = {
        f"mean_{name}_ms": float(np.mean(values)),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(np.std(values)),
    }
    for percent in percentiles:
        table[f"p{percent:g}_{name}_ms"] = float(np.percentile(values, percent))
    return table


def is_good(outcome: Outcome, objectives: dict[str, float]) -> bool:
    """Return whether a successful request met every latency objective.

    `objectives` has limits in milliseconds of "ttft", "tpot" and "e2el".
    """
    taken = {"ttft": outcome.ttft, "tpot": tpot(outcome), "e2el": outcome.latency}
    return all(taken[name] * 1e3 <= limit for name, limit in objectives.items())


def summarize(
    run: Run,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    objectives: dict[str, float],
) -> dict[str, Any]:
    """Return a dict of a load's results by vLLM's names: counts, throughputs, latency statistics.

    Throughputs are means over the whole duration. Failed requests are only counted.

    Args:
        metrics, percentiles: the latency metrics to include, and the percentiles of each.
        objectives: limits in milliseconds by metric, for the goodput. If empty, the goodput is
            None.
    """
    outcomes, duration = run.outcomes, max(run.duration, 1e-9)
    done = [outcome for outcome in outcomes if outcome.is_success]
    inputs, outputs = sum(o.input_tokens for o in done), sum(o.output_tokens for o in done)
    good = sum(is_good(outcome, objectives) for outcome in done)
    tokens, requests = peaks(done)
    result: dict[str, Any] = {
        "duration": run.duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / duration,
        "request_goodput": good / duration if objectives else None,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "max_output_tokens_per_s": tokens,
        "max_concurrent_requests": requests,
    }
    values = samples(outcomes)
    for name in metrics:
        result |= statistics_of(values[name], name, percentiles)
    return result


def peaks(done: Sequence[Outcome]) -> tuple[float, int]:
    """Return the most token events in one second, and the most requests in progress in one second.

    As in vLLM, seconds begin at the start of the first request, and an event counts as one token.
    Both numbers are 0 without requests.
    """
    if not done:
        return 0.0, 0
    start = min(outcome.sent for outcome in done)
    seconds = int(max(outcome.sent + outcome.latency for outcome in done) - start) + 2
    tokens, alive = np.zeros(seconds), np.zeros(seconds, int)
    for outcome in done:
        begin = outcome.sent - start
        times = begin + outcome.ttft + np.cumsum([0.0, *outcome.itls])
        np.add.at(tokens, np.minimum(times.astype(int), seconds - 1), 1)
        alive[int(begin) : int(begin + outcome.latency) + 1] += 1
    return float(tokens.max()), int(alive.max())


def details(run: Run) -> dict[str, Any]:
    """Return lists with one entry for each request of a load, by vLLM's names.

    They contain lengths, texts, errors, and times in seconds.
    """
    outcomes = run.outcomes
    return {
        "input_lens": [outcome.input_tokens for outcome in outcomes],
        "output_lens": [outcome.output_tokens for outcome in outcomes],
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": [outcome.itls for outcome in outcomes],
        "latencies": [outcome.latency for outcome in outcomes],
        "start_times": [outcome.sent for outcome in outcomes],
        "queue_times": [outcome.lag for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }


def table(
    result: dict[str, Any], metrics: Sequence[str], max_concurrency: int | None, rate: float
) -> str:
    """Return the results of `summarize` as text: the table that `vllm bench serve` prints.

    Args:
        max_concurrency: the limit of requests in progress, or None.
        rate: the requested number of requests per second.
    """

    def line(text: str, value: Any, decimals: bool = True) -> str:
        return f"{text + ':':<40} {f'{value:.2f}' if decimals else value:<10}"

    lines = [
        f"{' Serving Benchmark Result ':=^{WIDTH}}",
        line("Successful requests", result["completed"], False),
        line("Failed requests", result["failed"], False),
    ]
    if max_concurrency is not None:
        lines.append(line("Maximum request concurrency", max_concurrency, False))
    if rate != float("inf"):
        lines.append(line("Request rate configured (RPS)", rate))
    lines += [
        line("Benchmark duration (s)", result["duration"]),
        line("Total input tokens", result["total_input_tokens"], False),
        line("Total generated tokens", result["total_output_tokens"], False),
        line("Request throughput (req/s)", result["request_throughput"]),
    ]
    if result["request_goodput"] is not None:
        lines.append(line("Request goodput (req/s)", result["request_goodput"]))
    lines += [
        line("Output token throughput (tok/s)", result["output_throughput"]),
        line("Peak output token throughput (tok/s)", result["max_output_tokens_per_s"]),
        line("Peak concurrent requests", result["max_concurrent_requests"]),
        line("Total token throughput (tok/s)", result["total_token_throughput"]),
    ]
    for name in metrics:
        lines.append(f"{METRICS[name]:-^{WIDTH}}")
        for key, value in result.items():
            word, _, rest = key.partition("_")
            if rest == f"{name}_ms" and word != "std":
                lines.append(line(f"{word.capitalize()} {name.upper()} (ms)", value))
    return "\n".join([*lines, "=" * WIDTH])


def failures(run: Run) -> list[str]:
    """Return a line for each of the ten most frequent errors of a load, the most frequent first."""
    counts = Counter(outcome.error for outcome in run.outcomes if not outcome.is_success)
    return [f"failed, {count} times: {text}" for text, count in counts.most_common(10)]
