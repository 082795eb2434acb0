"""Cost of HTTP: tokens per second streamed through the server over those of AsyncLLM itself.

One process serves both ways in turn, so that the ratio is of one machine, one engine and one
minute. The clients of the HTTP half run in a process of their own, as they usually do.
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
import time
from multiprocessing.connection import Connection
from typing import Any, Self

from jaxserve.commands.argument_types import positive_integer
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.environment import prepare_process
from scripts.lib.argument_types import at_most, check_room, checkpoint, script_parser
from scripts.lib.run_main import end_at_sigterm, run_main
from scripts.lib.served_app import served_app

PROMPT = [5, 6, 7, 8]
STEP = 512  # tokens


def stream_all(port: int, streams: int, tokens: int) -> int:
    """Stream completions over plain sockets that are polled fifty times a second."""
    fields = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    tails: dict[socket.socket, bytes] = {}
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.encode() + body)
        tails[connection] = b""
    drawn = 0
    while tails:
        time.sleep(0.02)
        for connection in select.select(list(tails), [], [], 60)[0]:
            piece = connection.recv(1 << 18)
            tails[connection] = (tails[connection] + piece)[-4096:]
            if not piece:
                tail = tails.pop(connection)
                connection.close()
                usage = tail[tail.rindex(b'"completion_tokens":') :]
                drawn += int(usage.partition(b":")[2].partition(b",")[0])
    return drawn


def serve_clients(port: int, ours: Connection) -> None:
    """Serve (streams, tokens) jobs until killed. Answers are (tokens, seconds)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # at the terminal: our parent ends us
    while True:
        job = ours.recv()
        started = time.perf_counter()
        drawn = stream_all(port, *job)
        ours.send((drawn, time.perf_counter() - started))


class Clients:
    """Clients in a process of their own, as a context manager that always ends it."""

    def __init__(self, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=serve_clients, args=(port, theirs), daemon=True)
        self._process.start()
        theirs.close()

    async def stream(self, streams: int, tokens: int) -> tuple[int, float]:
        """Stream once. Return the tokens, and the seconds that they took.

        Raises:
            RuntimeError: the process has ended. It has printed the reason.
        """
        try:
            self._ours.send((streams, tokens))
            # Looked at now and then: a thread that waits for ever would outlast an interrupt.
            while not await asyncio.to_thread(self._ours.poll, 0.2):
                pass
            return self._ours.recv()
        except (EOFError, OSError):
            self._process.join()
            raise RuntimeError(f"the clients ended with {self._process.exitcode}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._ours.close()


async def direct(llm: Any, streams: int, tokens: int) -> tuple[int, float]:
    """Draw the same streams from AsyncLLM in this process."""
    # Imported here: the processes of the clients do without JAX.
    from jaxserve.request import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    async def draw() -> int:
        count = 0
        async for output in llm.generate(PROMPT, sampling):
            count += sum(len(part.token_ids) for part in output.outputs)
        return count

    started = time.perf_counter()
    drawn = sum(await asyncio.gather(*[draw() for _ in range(streams)]))
    return drawn, time.perf_counter() - started


async def measure(options: argparse.Namespace) -> list[dict[str, float]]:
    engine = EngineConfig(
        model=options.model,
        max_num_seqs=options.streams,
        decode_sizes=(options.streams,),
        token_sizes=(STEP,),
        max_num_batched_tokens=STEP,
        wait_for_all_programs=True,
    )
    interrupt = signal.getsignal(signal.SIGINT)
    async with served_app(engine) as (model, port, _):
        with Clients(port) as clients:
            await clients.stream(options.streams, 4)
            # The server drains at signals. This process just ends.
            signal.signal(signal.SIGINT, interrupt)
            end_at_sigterm()
            return [
                await pair(number, model.llm, clients, options) for number in range(options.repeats)
            ]


async def pair(
    number: int, llm: Any, clients: Clients, options: argparse.Namespace
) -> dict[str, float]:
    """Run both ways once, in another order every second time."""
    row: dict[str, float] = {}
    for half in ["direct", "http"] if number % 2 else ["http", "direct"]:
        cpu = time.process_time()
        if half == "http":
            drawn, seconds = await clients.stream(options.streams, options.tokens)
        else:
            drawn, seconds = await direct(llm, options.streams, options.tokens)
        assert drawn == options.streams * options.tokens
        row[half] = drawn / seconds
        row[f"{half}_cpu_us"] = (time.process_time() - cpu) / drawn * 1e6
    row["ratio"] = row["http"] / row["direct"]
    row["cpu_ratio"] = row["direct_cpu_us"] / row["http_cpu_us"]
    print({name: round(value, 3) for name, value in row.items()}, flush=True)
    return row


def main() -> None:
    parser = script_parser("scripts.bench.http_overhead", __doc__)
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
    run_main(main)
