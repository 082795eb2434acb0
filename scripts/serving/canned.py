"""A server that computes no answers: every open stream gets one event each tick.

    python -m scripts.serving.canned PORT MILLISECONDS

`python -m scripts.serving.bench --scene client` measures with it how many events a client can read.
"""

from __future__ import annotations

import argparse
import asyncio
import json

from jaxserve.commands.argument_types import positive
from scripts.lib.argument_types import at_most
from scripts.lib.run_main import run_main

EVENT = (
    b'data: {"id":"cmpl-0","object":"text_completion","created":0,"model":"canned","choices":'
    b'[{"index":0,"text":"x","logprobs":null,"finish_reason":null}]}\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Canned:
    """Server's open streams, each with the events that it still gets."""

    def __init__(self) -> None:
        self._left: dict[asyncio.StreamWriter, int] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if head.startswith(b"get"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                    continue
                length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                writer.write(HEAD)
                self._left[writer] = body["max_tokens"]
        except (asyncio.IncompleteReadError, OSError):
            self._left.pop(writer, None)
            writer.close()

    async def tick(self, seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            due = max(due + seconds, clock())
            await asyncio.sleep(due - clock())
            for writer, left in list(self._left.items()):
                if left:
                    self._left[writer] = left - 1
                    writer.write(chunk(EVENT))
                else:
                    del self._left[writer]
                    writer.write(chunk(b"data: [DONE]\n\n") + chunk(b""))


async def serve_canned(port: int, seconds: float) -> None:
    canned = Canned()
    server = await asyncio.start_server(canned.serve, "127.0.0.1", port, backlog=2048)
    async with server:
        await canned.tick(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.serving.canned", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("port", type=at_most(65_535))
    parser.add_argument("milliseconds", type=positive, help="from one tick to the next")
    arguments = parser.parse_args()
    asyncio.run(serve_canned(arguments.port, arguments.milliseconds / 1e3))


if __name__ == "__main__":
    run_main(main)
