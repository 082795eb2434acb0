"""Scenes of load on a jaxserve server: each starts a server, and writes results and a plot.

    python -m scripts.serving.bench --scene streams        512 concurrent streams, held to the end
    python -m scripts.serving.bench --scene overload       ten times capacity for a minute
    python -m scripts.serving.bench --scene overload-kept  the same over 200 kept connections

The server has the bundled model. Requests (`Work`), their outcomes and most of the report are those
of `jaxserve bench serve`, which puts load on any OpenAI-compatible server. Arrivals are open-loop.
Refused requests (429) are counted apart. Results go to `scripts/results`.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.commands.bench import report
from jaxserve.commands.bench.client import arrivals
from jaxserve.commands.bench.datasets import TOKEN_IDS
from jaxserve.commands.bench.outcome import Outcome, Run, Target, Work
from jaxserve.commands.bench.report import METRICS, samples, statistics_of
from scripts.lib.argument_types import script_parser
from scripts.lib.paths import RESULTS
from scripts.lib.run_main import end_at_sigterm, run_main
from scripts.lib.run_record import about_run
from scripts.lib.server_process import Server, ask
from scripts.serving.raw_load import RawLoad

PERCENTILES = (50, 90, 99)
# Every token is an event of its own, and seen as such also where its bytes are not yet text.
EXTRA = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
STREAMS, STREAM_TOKENS, STREAM_PROMPT = 512, 256, 64
OVERLOAD, OVERLOAD_S, INPUT, OUTPUT = 10, 60.0, 128, 128
SLOTS, CLOSED, CAPACITY_S = 32, 448, 30.0
KEPT = 200  # connections, where they are kept
ITL_GATE, REFUSAL_GATE_MS, THROUGHPUT_GATE = 1.2, 50.0, 0.9
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


def _target(server: Server) -> Target:
    model = ask(server.url + "/v1/models")["data"][0]["id"]
    return Target(server.url + "/v1/completions", model, extra=EXTRA)


def _save(name: str, result: dict[str, Any], runs: dict[str, Run], title: str) -> None:
    path = RESULTS / f"bench_serving_{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    plot(runs, path.with_suffix(".png"), title)
    print(f"written: {path.name}, {path.with_suffix('.png').name}")


def streams() -> int:
    """Hold 512 streams at once to the end. Compare some with the same request alone."""
    about = about_run()
    rng = np.random.default_rng(0)
    works = random_works(STREAMS, (STREAM_PROMPT, STREAM_TOKENS), 0.0, rng)
    arguments = (
        *("--max-num-seqs", str(STREAMS), "--max-num-batched-tokens", "1024"),
        *("--decode-sizes", f"1,32,128,{STREAMS}", "--token-sizes", "128,1024"),
        "--wait-for-all-programs",
    )
    with Server(*arguments) as server:
        run, _ = _load(server, works, [0.0] * STREAMS)
        sample = works[::64]
        alone, _ = _load(server, sample, [0.0] * len(sample), num_kept=1)
        healthy = ask(server.url + "/health")["status"] == "ok"
    whole = [
        outcome.is_success
        and len(outcome.token_ids) == STREAM_TOKENS
        and outcome.finish_reason == "length"
        for outcome in run.outcomes
    ]
    pairs = zip(run.outcomes[::64], alone.outcomes, strict=True)
    result = about | {
        "server": " ".join(arguments),
        "streams": STREAMS,
        "held_to_the_end": sum(whole),
        "lost": STREAMS - sum(whole),
        "equal_to_the_same_request_alone": [a.token_ids == b.token_ids for a, b in pairs],
        "healthy_after": healthy,
        **summarize(run, percentiles=PERCENTILES),
    }
    show(result)
    print(f"streams held to the end: {sum(whole)} of {STREAMS}")
    title = f"{STREAMS} streams of {STREAM_TOKENS} tokens, bundled model"
    _save("streams", result, {"streams": run}, title)
    return 0 if all(whole) and healthy else 1


def random_works(
    count: int, lengths: tuple[int, int], range_ratio: float, rng: np.random.Generator
) -> list[Work]:
    """Draw requests whose prompts share no prefix.

    Prompts of `jaxserve bench` repeat after as many requests as the vocabulary has tokens, so that
    the prefix cache answers part of a long run.

    Args:
        lengths: mean tokens of the prompt and of the answer.
        range_ratio: r, lengths are drawn from [mean * (1 - r), mean * (1 + r)].
    """

    def draw(mean: int) -> list[int]:
        low, high = math.floor(mean * (1 - range_ratio)), math.ceil(mean * (1 + range_ratio))
        return rng.integers(max(1, low), high + 1, count).tolist()

    pairs = zip(draw(lengths[0]), draw(lengths[1]), strict=True)
    return [Work(rng.integers(*TOKEN_IDS, i).tolist(), i, o) for i, o in pairs]


def _works(count: int, rng: np.random.Generator) -> list[Work]:
    return random_works(count, (INPUT, OUTPUT), 0.5, rng)


def _load(
    server: Server, works: Sequence[Work], times: Sequence[float], num_kept: int | None = None
) -> tuple[Run, dict[str, float]]:
    """Run a load with the client that costs little.

    Returns:
        The run, and the cores that server and client took.
    """
    load = RawLoad(_target(server), works, num_kept)
    cpu = server.cpu_seconds()
    run = load.run(times)
    cores = (server.cpu_seconds() - cpu) / run.duration
    shares = {"server_cores": cores, "client_cores": run.cpu_seconds / run.duration}
    print(f"server: {cores:.2f} cores, client: {shares['client_cores']:.2f} cores")
    return run, shares


def overload(num_kept: int | None = None) -> int:
    """Measure capacity, then Poisson arrivals at it, then at ten times that for a minute.

    Args:
        num_kept: connections that all requests share. None opens one for each request.
    """
    about = about_run()
    rng = np.random.default_rng(0)
    with Server("--max-num-seqs", str(SLOTS), "--wait-for-all-programs") as server:
        _load(server, _works(64, rng), [0.0] * 64, SLOTS)  # warm-up
        # As many at once as run together, refilled at once: no queue, no empty slot.
        closed, _ = _load(server, _works(CLOSED, rng), [0.0] * CLOSED, SLOTS)
        capacity = CLOSED / closed.duration
        print(f"capacity: {capacity:.1f} requests/s")
        runs, shares = {}, {}
        for name, times, seconds in (
            ("at capacity", 1, CAPACITY_S),
            (f"{OVERLOAD} times capacity", OVERLOAD, OVERLOAD_S),
        ):
            count = math.ceil(capacity * times * seconds)
            planned = arrivals(count, capacity * times, 1.0, seed=times)
            runs[name], shares[name] = _load(server, _works(count, rng), planned, num_kept)
        time.sleep(1)
        healthy = ask(server.url + "/health")["status"] == "ok"
    at_capacity, over = (summarize(run, percentiles=PERCENTILES) for run in runs.values())
    ratio = over["p99_itl_ms"] / at_capacity["p99_itl_ms"]
    throughput = over["output_throughput"] / at_capacity["output_throughput"]
    refusal = over.get("p99_refused_ms", 0.0)
    result = about | {
        "connections": num_kept or "one a request",
        "capacity_requests_per_s": capacity,
        "offered_requests_per_s": capacity * OVERLOAD,
        "input_tokens": f"{INPUT} +- 50%",
        "output_tokens": f"{OUTPUT} +- 50%",
        "p99_itl_ratio": ratio,
        "p99_itl_ratio_gate": ITL_GATE,
        "throughput_ratio": throughput,
        "throughput_ratio_gate": THROUGHPUT_GATE,
        "p99_tpot_ratio": over["p99_tpot_ms"] / at_capacity["p99_tpot_ms"],
        "median_tpot_ratio": over["median_tpot_ms"] / at_capacity["median_tpot_ms"],
        "p99_refused_ms": refusal,
        "p99_refused_gate_ms": REFUSAL_GATE_MS,
        "cores": shares,
        "healthy_after": healthy,
        "closed_loop": summarize(closed, percentiles=PERCENTILES),
        "at_capacity": at_capacity,
        "overload": over,
    }
    for summary in (at_capacity, over):
        show(summary)
    print(
        f"{OVERLOAD} times capacity over capacity: p99 inter-token latency {ratio:.2f} (gate "
        f"{ITL_GATE}), throughput {throughput:.2f} (gate {THROUGHPUT_GATE}); time per output token:"
        f" p99 {result['p99_tpot_ratio']:.2f}, median {result['median_tpot_ratio']:.2f}; refused "
        f"in {refusal:.1f} ms at p99 (gate {REFUSAL_GATE_MS})"
    )
    title = f"bundled model; capacity {capacity:.0f} requests/s; two shared cores with the client"
    _save("overload" if num_kept is None else "overload_kept", result, runs, title)
    return 0 if not over["failed"] and healthy else 1


SCENES: dict[str, Callable[[], int]] = {
    "streams": streams,
    "overload": overload,
    "overload-kept": partial(overload, KEPT),
}


def main() -> int:
    parser = script_parser(
        "scripts.serving.bench",
        __doc__,
        epilog="`jaxserve bench serve` puts load on any OpenAI-compatible server.",
        allow_abbrev=False,
    )
    parser.add_argument("--scene", choices=SCENES, required=True)
    arguments = parser.parse_args()
    end_at_sigterm()
    return SCENES[arguments.scene]()


if __name__ == "__main__":
    run_main(main)
