"""Scenes of a fleet on Ray Serve: the cost of its fronts, and its behavior at failures.

    python -m scripts.serving.fleet --scene cost --json scripts/results/fleet.json
    python -m scripts.serving.fleet --scene kill --times 20 --json scripts/results/fleet.json
    python -m scripts.serving.fleet --scene scale --json scripts/results/fleet.json
    python -m scripts.serving.fleet --scene soak --seconds 1800 --json scripts/results/fleet.json

cost    One replica of the bundled model: bare, behind Serve's proxy, behind HAProxy, and behind
        vllm-router where it is installed. CPU time a chunk of a stream, of the process that serves
        and of all others, less their idle time, and the median of a request for one token.
kill    One of two replicas is killed under 200 requests of the openai client, which may try again
        as it does by default: whole answers all come, streams in progress break with an error
        after a right beginning, and the replacement answers.
scale   Autoscaling from 1 replica to 3 and back under load, without an error.
soak    Whole answers, streams and abandoned streams, for half an hour, with a replica killed every
        minute and a half. Memory and files of all other processes show no slope, but for the logs
        of the dead that Ray holds, and no page is held at the end.

Every scene ends with no process left over. Exit code 1 after a failure.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import numpy as np

from jaxserve.commands.argument_types import positive, positive_integer
from scripts.lib.argument_types import bench_parser
from scripts.lib.processes import memory_bytes
from scripts.lib.run_main import end_at_sigterm, run_main
from scripts.lib.run_record import about_run, keep
from scripts.lib.server_process import Server, Serving, free_port, read_metric
from scripts.serving.fleet_load import MODEL, Load
from scripts.serving.replicas import (
    SMALL,
    Fleet,
    cpu_seconds,
    cpu_since,
    open_files,
)

IDLE_SECONDS = 4.0
# Long ones: short ones have the fixed cost of a request.
STREAMS, AT_ONCE, TOKENS = 12, 4, 900
SHORT = 100
READY_SECONDS = 120.0
KILL_EVERY = 90.0
# Growth that counts as zero: of 30 minutes, by the fitted line.
MOST_GROWTH_BYTES, MOST_GROWTH_FILES = 32 << 20, 8
Result = dict[str, Any]


async def _streams(url: str) -> int:
    """Read streams to their ends. Return their chunks."""
    body = {
        "model": MODEL,
        "prompt": "Reverse: s-t-o-n-e",
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    chunks, left = 0, STREAMS

    async def worker(session: aiohttp.ClientSession) -> None:
        nonlocal chunks, left
        while left > 0:
            left -= 1
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.content:
                    chunks += line.startswith(b"data: {")

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(worker(session) for _ in range(AT_ONCE)))
    return chunks


async def _short(url: str) -> float:
    body = {"model": MODEL, "prompt": "Reverse: a-b", "max_tokens": 1, "temperature": 0}
    seconds = []
    async with aiohttp.ClientSession() as session:
        for _ in range(SHORT):
            started = time.perf_counter()
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                await answer.read()
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def measure_front(name: str, url: str, serving: list[int], others: list[int]) -> Result:
    """Measure a front: CPU time a chunk, of the server and of all others, and a short request."""
    asyncio.run(_streams(url))  # programs, connections
    before = cpu_seconds(others)
    time.sleep(IDLE_SECONDS)
    idle = cpu_since(before) / IDLE_SECONDS
    started, own, rest = time.perf_counter(), cpu_seconds(serving), cpu_seconds(others)
    chunks = asyncio.run(_streams(url))
    seconds = time.perf_counter() - started
    row = {
        "serving_us_a_chunk": 1e6 * cpu_since(own) / chunks,
        "front_us_a_chunk": 1e6 * (cpu_since(rest) - idle * seconds) / chunks,
        "short_p50_ms": 1e3 * asyncio.run(_short(url)),
        "chunks_a_second": chunks / seconds,
        "idle_cpu_pct": 100 * idle,
    }
    print(
        f"{name:>12}: {row['front_us_a_chunk']:6.1f} us of CPU a chunk before the server, "
        f"{row['serving_us_a_chunk']:6.1f} in it; short request {row['short_p50_ms']:.1f} ms; "
        f"{row['chunks_a_second']:.0f} chunks/s; idle {row['idle_cpu_pct']:.1f} % of a core",
        flush=True,
    )
    return row


def cost(arguments: argparse.Namespace) -> Result:
    """Measure every front in one run, each with one replica."""
    results: Result = {}
    with Server(*SMALL) as server:
        results["bare"] = measure_front("bare", server.url, [server.process.pid], [])
        if shutil.which("vllm-router"):
            port = str(free_port())
            words = ["vllm-router", "--worker-urls", server.url, "--host", "127.0.0.1"]
            url = f"http://127.0.0.1:{port}"
            with Serving([*words, "--port", port], url, ready="/v1/models") as router:
                numbers = [server.process.pid], [router.process.pid]
                results["vllm-router"] = measure_front("vllm-router", url, *numbers)
    for name, with_haproxy in (("ray", False), ("ray_haproxy", True)):
        more = ("--autoscaling-config", '{"min_replicas": 1, "max_replicas": 1}')
        with Fleet(*more, num_replicas=1, with_haproxy=with_haproxy) as fleet:
            serving = fleet.replicas()
            others = [number for number in fleet.processes() if number not in serving]
            results[name] = measure_front(name, fleet.url, serving, others)
    return results


def _replacement(fleet: Fleet, before: set[int], victim: int, killed: float) -> tuple[float, float]:
    """Return seconds from the kill to the new process, and from there to its first answer."""
    while len(set(fleet.replicas()) - {victim}) < 2:
        if time.monotonic() > killed + READY_SECONDS:
            raise RuntimeError("no replica took the place of the one that was killed")
        time.sleep(0.05)
    born = time.monotonic()
    while not fleet.starts(2) - before:
        if time.monotonic() > killed + READY_SECONDS:
            raise RuntimeError("the new replica does not answer")
        time.sleep(0.05)
    return born - killed, time.monotonic() - born


async def kill_once(fleet: Fleet, count: int, max_retries: int) -> Result:
    """Kill a replica under load. Return the ends of the requests, and the times of the replica."""
    load = Load(fleet.url, max_retries)
    await load.learn()
    before = fleet.starts()
    replacement: asyncio.Future[tuple[float, float]] | None = None

    def on_done(number: int) -> None:
        nonlocal replacement
        # On a busy machine the replica of the kill before may be late.
        if replacement is None and number >= count // 3 and len(fleet.replicas()) == 2:
            victim = fleet.replicas()[0]
            os.kill(victim, signal.SIGKILL)
            replacement = asyncio.ensure_future(
                asyncio.to_thread(_replacement, fleet, before, victim, time.monotonic())
            )

    await load.run(count, 12, on_done=on_done)
    if replacement is None:
        raise RuntimeError("there never were two replicas")
    appeared, answered = await replacement
    await load.close()
    times = {"replaced_after_s": appeared, "started_in_s": answered}
    return load.outcomes.summary() | times


def kill(arguments: argparse.Namespace) -> Result:
    runs = []
    with Fleet(with_haproxy=arguments.haproxy) as fleet:
        for number in range(arguments.times):
            runs.append(asyncio.run(kill_once(fleet, 200, arguments.max_retries)))
            print(f"{number + 1}: {runs[-1]}", flush=True)
            time.sleep(1.0)
    failed = sum(run["num_failures"] for run in runs)
    _require(not failed, f"{failed} requests failed")
    return {"max_retries": arguments.max_retries, "runs": runs}


def scale(arguments: argparse.Namespace) -> Result:
    """Let the fleet grow from 1 to 3 replicas and shrink again, under load all the while."""
    config = (
        '{"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 2, '
        '"upscale_delay_s": 1, "downscale_delay_s": 5, "look_back_period_s": 5, '
        '"metrics_interval_s": 1}'
    )
    with Fleet("--autoscaling-config", config, with_haproxy=arguments.haproxy) as fleet:
        seen: list[int] = []

        async def work() -> Load:
            load = Load(fleet.url, 0)
            await load.learn()
            for at_once, wanted in ((12, 3), (1, 1)):
                end = time.monotonic() + READY_SECONDS
                while time.monotonic() < end:
                    await load.run(2 * at_once, at_once)
                    seen.append(len(fleet.replicas()))
                    if seen[-1] == wanted:
                        break
            await load.close()
            return load

        load = asyncio.run(work())
    result = load.outcomes.summary() | {"most": max(seen), "last": seen[-1]}
    print(result)
    _require(max(seen) == 3 and seen[-1] == 1, f"replicas were {seen}")
    _require(not result["num_failures"] and not result["broken"], "there were errors")
    return result


def soak(arguments: argparse.Namespace) -> Result:
    """Load a fleet for a long time, kill a replica now and then, and watch the others."""
    samples: list[tuple[float, int, int]] = []
    kills = 0
    with Fleet(with_haproxy=arguments.haproxy) as fleet:
        started = last_kill = time.monotonic()
        # An idle process may become a replica, which takes memory. Ray's log monitor holds the two
        # logs of every process that has died, up to a limit of its own.
        others = ("ray::Serve", "ray::IDLE")
        steady = [
            number
            for number, line in fleet.processes().items()
            if not line.startswith(others) and "log_monitor" not in line
        ]
        load = Load(fleet.url, 2)

        async def work() -> None:
            nonlocal kills, last_kill
            await load.learn()
            while (now := time.monotonic()) < started + arguments.seconds:
                await load.run(48, 8, kinds="uusa")
                alive = [number for number in steady if number in fleet.processes()]
                memory, files = memory_bytes(alive), sum(map(open_files, alive))
                samples.append((now - started, memory, files))
                if now - last_kill > KILL_EVERY and len(fleet.replicas()) == 2:
                    os.kill(fleet.replicas()[kills % 2], signal.SIGKILL)
                    kills, last_kill = kills + 1, now
            await load.close()

        asyncio.run(work())
        time.sleep(IDLE_SECONDS)  # streams that were left end a step later
        held = max(read_metric(fleet.url, "num_pages_in_use") for _ in range(8))  # of any replica
        half = [sample for sample in samples if sample[0] > arguments.seconds / 5]
        times, memory, files = np.array(half, float).T
        growth = {
            "memory_bytes_in_30_min": 1800 * float(np.polyfit(times, memory, 1)[0]),
            "files_in_30_min": 1800 * float(np.polyfit(times, files, 1)[0]),
        }
        about = {"pages_held": held, "kills": kills, "seconds": arguments.seconds}
        result = load.outcomes.summary() | growth | about
        print(result, flush=True)
    _require(not result["num_failures"], "requests failed")
    _require(not held, f"{held:.0f} pages are held when nothing runs")
    _require(growth["memory_bytes_in_30_min"] < MOST_GROWTH_BYTES, "memory grows")
    _require(growth["files_in_30_min"] < MOST_GROWTH_FILES, "open files grow")
    return result


def _require(is_good: bool, what: str) -> None:
    if not is_good:
        raise SystemExit(f"failed: {what}")


SCENES: dict[str, Callable[[argparse.Namespace], Result]] = {
    scene.__name__: scene for scene in (cost, kill, scale, soak)
}


def main() -> None:
    parser = bench_parser("scripts.serving.fleet", __doc__)
    parser.add_argument("--scene", choices=SCENES, required=True)
    parser.add_argument("--times", type=positive_integer, default=20, help="of kill")
    parser.add_argument("--seconds", type=positive, default=1800.0, help="of soak")
    parser.add_argument("--max-retries", type=int, default=2, help="of the openai client")
    parser.add_argument("--haproxy", action="store_true", help="in front of kill, scale and soak")
    arguments = parser.parse_args()
    end_at_sigterm()
    about = about_run()
    result = SCENES[arguments.scene](arguments)
    if arguments.json:
        name = arguments.scene + ("_haproxy" if arguments.haproxy else "")
        keep(arguments.json, {name: result}, about)


if __name__ == "__main__":
    run_main(main)
