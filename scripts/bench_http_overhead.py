"""What HTTP costs: tokens per second streamed through the server over those of AsyncLLM itself.

One process serves both ways in turn, so that the ratio is of one machine, one engine and one
minute; the clients of the HTTP half run in a process of their own, as they do in life.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import select
import signal
import socket
import statistics
import sys
import time
from typing import Any

from argument_types import at_most, check_room, checkpoint, positive_integer
from jaxserve.config import EngineConfig, prepare_process

PROMPT = [5, 6, 7, 8]
STEP = 512  # tokens


def stream_all(port: int, streams: int, tokens: int) -> int:
    """Stream completions over plain sockets, looking at them fifty times a second."""
    fields = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    tails: dict[socket.socket, bytes] = {}
    for _ in range(streams):
        one = socket.create_connection(("127.0.0.1", port))
        one.sendall(head.encode() + body)
        tails[one] = b""
    drawn = 0
    while tails:
        time.sleep(0.02)
        for one in select.select(list(tails), [], [], 60)[0]:
            piece = one.recv(1 << 18)
            tails[one] = (tails[one] + piece)[-4096:]
            if not piece:
                tail = tails.pop(one)
                one.close()
                usage = tail[tail.rindex(b'"completion_tokens":') :]
                drawn += int(usage.partition(b":")[2].partition(b",")[0])
    return drawn


def clients(port: int, jobs: Any, results: Any) -> None:
    """Serve (streams, tokens) jobs until None comes; results are (tokens, seconds)."""
    while (job := jobs.get()) is not None:
        started = time.perf_counter()
        drawn = stream_all(port, *job)
        results.put((drawn, time.perf_counter() - started))


async def direct(llm: Any, streams: int, tokens: int) -> tuple[int, float]:
    """The same streams from AsyncLLM in this process."""
    sampling = llm_sampling(tokens)

    async def one() -> int:
        count = 0
        async for output in llm.generate(PROMPT, sampling):
            count += sum(len(part.token_ids) for part in output.outputs)
        return count

    started = time.perf_counter()
    drawn = sum(await asyncio.gather(*[one() for _ in range(streams)]))
    return drawn, time.perf_counter() - started


def llm_sampling(tokens: int) -> Any:
    from jaxserve.request import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


async def measure(options: argparse.Namespace) -> list[dict[str, float]]:
    from jaxserve.server.app import App
    from jaxserve.server.listener import bind
    from jaxserve.server.plans import ModelPlan
    from jaxserve.server.process import Process
    from jaxserve.server.serve import StartReport, load_models
    from jaxserve.server.settings import ServerConfig

    engine = EngineConfig(
        model=options.model,
        max_num_seqs=options.streams,
        decode_sizes=(options.streams,),
        token_sizes=(STEP,),
        max_num_batched_tokens=STEP,
    )
    settings = ServerConfig(port=0)
    models = load_models([ModelPlan(["bench"], "bench", engine)], settings, StartReport(sys.stderr))
    [model] = models.all
    process = Process(App(models, settings))
    rows = []
    with bind("127.0.0.1", 0) as listener:
        serving = asyncio.ensure_future(process.serve(sockets=[listener]))
        context = multiprocessing.get_context("spawn")
        jobs, results = context.SimpleQueue(), context.SimpleQueue()
        port = listener.getsockname()[1]
        other = context.Process(target=clients, args=(port, jobs, results), daemon=True)
        other.start()
        jobs.put((options.streams, 4))
        await asyncio.to_thread(results.get)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the server drains at it; we just end
        for number in range(options.repeats):
            halves = ["direct", "http"] if number % 2 else ["http", "direct"]
            row: dict[str, float] = {}
            for half in halves:
                cpu = time.process_time()
                if half == "http":
                    jobs.put((options.streams, options.tokens))
                    drawn, seconds = await asyncio.to_thread(results.get)
                else:
                    drawn, seconds = await direct(model.llm, options.streams, options.tokens)
                assert drawn == options.streams * options.tokens
                row[half] = drawn / seconds
                row[f"{half}_cpu_us"] = (time.process_time() - cpu) / drawn * 1e6
            row["ratio"] = row["http"] / row["direct"]
            row["cpu_ratio"] = row["direct_cpu_us"] / row["http_cpu_us"]
            rows.append(row)
            print({name: round(value, 3) for name, value in row.items()}, flush=True)
        jobs.put(None)
        other.join()
        process.handle_exit(15, None)
        await serving
    model.llm.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=checkpoint, help="(default: bundled model)")
    parser.add_argument("--streams", type=at_most(STEP), default=64)
    parser.add_argument("--tokens", type=positive_integer, default=800, help="of each stream")
    parser.add_argument("--repeats", type=positive_integer, default=5)
    options = parser.parse_args()
    prepare_process()
    check_room(parser, options.model, len(PROMPT), options.tokens)
    rows = asyncio.run(measure(options))
    for name, meaning in (
        ("ratio", "tokens/s, HTTP over AsyncLLM"),
        ("cpu_ratio", "tokens per second of CPU time of the serving process, likewise"),
    ):
        median = statistics.median(row[name] for row in rows)
        print(f"{meaning}, {options.streams} streams, median of {len(rows)}: {median:.3f}")


if __name__ == "__main__":
    main()
