"""The HTTP front of the workers: token ids in, events with token ids out. Standard library only.

It serves the part of /v1/completions that the client of `jaxserve bench serve` uses, so that
engines without a server are measured in the same way as servers. The thread that has tokens writes
them to the socket at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

# How long a static batch waits for another request before it starts: all that were sent
# together shall be in it.
GATHER_S = 0.03
# A header of requests that are sent one at a time: no other comes with them.
ALONE = "x-sent-alone"


class Job:
    """One request: `write` takes its tokens as they come, until there are as many as it wants."""

    def __init__(
        self,
        prompt: list[int],
        max_tokens: int,
        send: Callable[[bytes], Any],
        is_alone: bool = False,
    ) -> None:
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.is_alone = is_alone
        self.written = 0
        self.done = threading.Event()
        self._send = send

    def write(self, token_ids: list[int]) -> None:
        """Write tokens, and drop those beyond the wanted length. The last one ends the answer."""
        token_ids = token_ids[: self.max_tokens - self.written]
        if not token_ids or self.done.is_set():
            return
        self.written += len(token_ids)
        is_last = self.written == self.max_tokens
        choice = {"index": 0, "text": "", "token_ids": token_ids}
        self._event({"choices": [choice | {"finish_reason": "length" if is_last else None}]})
        if is_last:
            counts = {"prompt_tokens": len(self.prompt), "completion_tokens": self.written}
            self._event({"choices": [], "usage": counts})
            self._end()

    def fail(self, message: str) -> None:
        self._event({"error": {"message": message}})
        self._end()

    def _event(self, fields: dict[str, Any]) -> None:
        try:
            self._send(b"data: " + json.dumps(fields).encode() + b"\n\n")
        except OSError:  # the client has left
            self.done.set()

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._send(b"data: [DONE]\n\n")
        self.done.set()


class _Server(ThreadingHTTPServer):
    request_queue_size = 1024
    daemon_threads = True


class Front:
    """Listener whose `jobs` fill with requests.

    Args:
        port: on the loopback interface.
        extra: the answer of other paths, a function of the JSON that was sent.
    """

    def __init__(self, port: int, extra: dict[str, Callable[[Any], Any]] | None = None) -> None:
        self.jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        answers = {"/health": lambda _: {}, "/v1/models": lambda _: {"data": [{"id": "model"}]}}
        answers |= extra or {}
        jobs = self.jobs

        class Handler(BaseHTTPRequestHandler):
            # Or a token would wait up to 40 ms for the one before it to be acknowledged.
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                if self.path not in answers:
                    self.send_error(404)
                    return
                self._answer(answers[self.path](None))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.path != "/v1/completions":
                    self._answer(answers[self.path](body))
                    return
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                is_alone = ALONE in self.headers
                job = Job(body["prompt"], body["max_tokens"], self.wfile.write, is_alone)
                jobs.put(job)
                job.done.wait()

            def _answer(self, fields: Any) -> None:
                body = json.dumps(fields).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = _Server(("127.0.0.1", port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def batch(self, most: int) -> list[Job]:
        """Wait for a request, then for others that come with it, up to `most`.

        One that is sent alone is not kept waiting for others.
        """
        jobs = [self.jobs.get()]
        while len(jobs) < most and not jobs[0].is_alone:
            try:
                jobs.append(self.jobs.get(timeout=GATHER_S))
            except queue.Empty:
                break
        return jobs

    def waiting(self) -> list[Job]:
        """Take all that have come, without waiting for any."""
        jobs = []
        while True:
            try:
                jobs.append(self.jobs.get_nowait())
            except queue.Empty:
                return jobs


def arguments(*more: tuple[str, str]) -> argparse.Namespace:
    """Parse the arguments of `engine.worker`, and the worker's own options with their defaults."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    for name in ("--port", "--rows", "--threads", "--max-len"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--dtype", required=True)
    for name, default in more:
        parser.add_argument(name, default=default)
    return parser.parse_args()
