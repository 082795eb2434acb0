"""Scenes of load on a jaxserve server: each starts a server, and writes results and a plot.

    python -m scripts.serving.bench --scene streams        512 concurrent streams, held to the end
    python -m scripts.serving.bench --scene overload       ten times capacity for a minute
    python -m scripts.serving.bench --scene overload-kept  the same over 200 kept connections
    python -m scripts.serving.bench --scene client         events a second that the client can read

The server has the bundled model. Requests (`Work`), their outcomes and most of the report are those
of `jaxserve bench serve`, which puts load on any OpenAI-compatible server. Arrivals are open-loop.
Refused requests (429) are counted apart. Results go to `scripts/results`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxserve.commands.bench.client import arrivals, open_client, run_load
from jaxserve.commands.bench.datasets import TOKEN_IDS
from jaxserve.commands.bench.outcome import Run, Target, Work
from scripts.lib.paths import RESULTS, ROOT
from scripts.lib.run_main import end_at_sigterm, run_main
from scripts.lib.run_record import about_run
from scripts.lib.server_process import Server, ask, free_port
from scripts.serving.raw_load import RawLoad
from scripts.serving.report import plot, show, summarize

PERCENTILES = (50, 90, 99)
# Every token is an event of its own, and seen as such also where its bytes are not yet text.
EXTRA = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
STREAMS, STREAM_TOKENS, STREAM_PROMPT = 512, 256, 64
OVERLOAD, OVERLOAD_S, INPUT, OUTPUT = 10, 60.0, 128, 128
SLOTS, CLOSED, CAPACITY_S = 32, 448, 30.0
KEPT = 200  # connections, where they are kept
ITL_GATE, REFUSAL_GATE_MS, THROUGHPUT_GATE = 1.2, 50.0, 0.9


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
        alone, _ = _load(server, works[::64], [0.0] * 8, num_kept=1)
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


def overload_kept() -> int:
    """Do the same over connections that are kept."""
    return overload(KEPT)


def client() -> int:
    """Measure the client of `jaxserve bench` with a server that computes no answers."""
    about = about_run()
    table = []
    for streams_at_once, milliseconds in ((32, 10), (512, 100), (512, 50), (512, 25)):
        port = free_port()
        command = [sys.executable, "-m", "scripts.serving.canned", str(port), str(milliseconds)]
        process = subprocess.Popen(command, cwd=ROOT)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url)
            tokens = 10_000 // milliseconds
            works = [Work([1], 1, tokens)] * streams_at_once
            run = asyncio.run(_run_client(Target(url, "canned"), works))
        finally:
            process.kill()
            process.wait()
        result = summarize(run, percentiles=PERCENTILES)
        keys = ("client_cpu_cores", "client_cpu_us_per_event", "median_itl_ms", "p99_itl_ms")
        table.append({"streams": streams_at_once, "tick_ms": milliseconds})
        table[-1] |= {key: round(result[key], 2) for key in keys}
        table[-1]["events_per_s"] = round(result["output_throughput"])
        print(table[-1])
    path = RESULTS / "bench_serving_client.json"
    path.write_text(json.dumps(about | {"runs": table}, indent=1) + "\n")
    return 0


async def _run_client(target: Target, works: Sequence[Work]) -> Run:
    async with open_client(target) as session:
        return await run_load(session, target, works, [0.0] * len(works))


def _wait(url: str) -> None:
    for _ in range(100):
        try:
            ask(url)
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the canned server did not come up")


SCENES: dict[str, Callable[[], int]] = {
    "streams": streams,
    "overload": overload,
    "overload-kept": overload_kept,
    "client": client,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.serving.bench",
        description=(__doc__ or "").splitlines()[0],
        epilog="`jaxserve bench serve` puts load on any OpenAI-compatible server.",
        allow_abbrev=False,
    )
    parser.add_argument("--scene", choices=SCENES, required=True)
    arguments = parser.parse_args()
    end_at_sigterm()
    return SCENES[arguments.scene]()


if __name__ == "__main__":
    run_main(main)
