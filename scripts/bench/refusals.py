"""CPU time that a server whose queue is full spends on a request.

    python -m scripts.bench.refusals

Each request on a connection of its own, on connections that are kept, and there in two parts, head
and body, as some clients send them. The server is otherwise idle.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import time

from jaxserve.commands.argument_types import positive_integer
from jaxserve.commands.bench.outcome import Target, Work
from jaxserve.settings.config import EngineConfig
from scripts.lib.argument_types import script_parser
from scripts.lib.paths import ROOT
from scripts.lib.processes import cpu_seconds
from scripts.lib.run_main import end_at_sigterm, run_main
from scripts.lib.served_app import served_app

FORMS = ("own", "kept", "parts")
AT_ONCE, TOKENS = 16, 128
HEAD = (
    "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: */*\r\nuser-agent: jaxserve\r\n"
    "accept-encoding: gzip, deflate\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
)


async def serve_full() -> None:
    """Serve the bundled model with every place taken. Print the port."""
    engine = EngineConfig(
        max_num_seqs=2,
        max_num_batched_tokens=32,
        decode_sizes=(2,),
        token_sizes=(32,),
        num_gpu_blocks_override=30,
    )
    async with served_app(engine) as (model, port, serving):
        admission = model.admission
        admission.num_live = admission.num_slots + admission.max_queued
        print(port, flush=True)
        await serving


def refuse(port: int, form: str, count: int) -> int:
    """Send requests, `AT_ONCE` at a time. Return how many were refused."""
    body = Target("", "bench").body(Work(list(range(100, 100 + TOKENS)), TOKENS, TOKENS))
    parts = [(HEAD % len(body)).encode(), body]
    parts = parts if form == "parts" else [b"".join(parts)]
    clients: list[socket.socket] = []
    num_refused = 0
    for _ in range(count // AT_ONCE):
        if form == "own" or not clients:
            clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(AT_ONCE)]
        for client in clients:
            for part in parts:
                client.sendall(part)
        for client in clients:
            num_refused += client.recv(1 << 16).startswith(b"HTTP/1.1 429 ")
            if form == "own":
                client.close()
    for client in clients:
        client.close()
    return num_refused


def main() -> int:
    parser = script_parser("scripts.bench.refusals", __doc__)
    parser.add_argument("--requests", type=positive_integer, default=20_000, help="of each form")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve_full())
        return 0
    end_at_sigterm()
    command = [sys.executable, "-m", "scripts.bench.refusals", "--serve"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the server did not start")
        port = int(line)
        count = max(AT_ONCE, arguments.requests // AT_ONCE * AT_ONCE)
        for form in FORMS:
            refuse(port, form, AT_ONCE)
            server, client = cpu_seconds(process.pid), time.process_time()
            clock = time.perf_counter()
            num_refused = refuse(port, form, count)
            server, client = cpu_seconds(process.pid) - server, time.process_time() - client
            print(
                f"{form}: {num_refused} of {count} refused; CPU us each: server "
                f"{server / count * 1e6:.0f}, client {client / count * 1e6:.0f}; "
                f"{count / (time.perf_counter() - clock):.0f} a second"
            )
            if num_refused < count:
                return 1
    finally:
        process.terminate()
        process.wait()
    return 0


if __name__ == "__main__":
    run_main(main)
