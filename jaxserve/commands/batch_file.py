"""Work of `jaxserve run-batch`: OpenAI's batch files, through the server's own application."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import httpx2
import msgspec
from tqdm import tqdm

from jaxserve.commands.server import load_models
from jaxserve.server.http.app import App
from jaxserve.server.http.start_report import StartReport
from jaxserve.server.served.specs import ModelSpec
from jaxserve.server.settings import ServerConfig

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
# The longest line in units of the largest body, whose characters may be written as escapes.
LINE_FACTOR = 2
# Lines in progress for each slot of the engine: enough that no slot waits for its next line.
LINES_A_SLOT = 2
NO_LIMIT, NO_SECONDS = 2**31 - 1, 1e9


class Line(msgspec.Struct):
    """A request of a batch file. Its body is sent as it was written."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BatchResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct):
    code: str
    message: str


class BatchOutput(msgspec.Struct):
    """A line of the output: the answer, whatever its status, or the reason for none."""

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None


class BadLine(Exception):
    """A line that is no request.

    Attributes:
        custom_id: where the line has one.
        code: short name for programs.
    """

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


def batch_config(**settings: Any) -> ServerConfig:
    """Return settings without queue limits and deadlines: no other client waits."""
    return ServerConfig(
        **settings,
        max_num_queued_reqs=NO_LIMIT,
        max_queued_prompt_tokens=NO_LIMIT,
        queue_timeout=NO_SECONDS,
        request_timeout=NO_SECONDS,
    )


def lines(file: BinaryIO, most: int) -> Iterator[bytes | None]:
    """Yield the lines that are not blank, None in place of one of more than `most` bytes."""
    while line := file.readline(most + 1):
        if len(line) > most:
            while line and not line.endswith(b"\n"):
                line = file.readline(most)
            yield None
        elif line.strip():
            yield line


def read_line(text: bytes | None) -> Line:
    """Read a line as a request.

    Raises:
        BadLine: naming what is wrong with it.
    """
    if text is None:
        raise BadLine("line_too_long", "the line is too long")
    try:
        line = msgspec.json.decode(text, type=Line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        is_json = isinstance(error, msgspec.ValidationError)
        code, what = ("invalid_line", "") if is_json else ("invalid_json", "not JSON: ")
        raise BadLine(code, f"{what}{error}", _custom_id(text)) from error
    if line.method != "POST":
        raise BadLine(
            "invalid_method", f"method must be POST, got {line.method[:40]!r}", line.custom_id
        )
    if line.url not in URLS:
        allowed = ", ".join(URLS)
        raise BadLine(
            "invalid_url", f"url must be one of {allowed}; got {line.url[:80]!r}", line.custom_id
        )
    if _streams(line.body):
        raise BadLine("invalid_request", "stream is not possible in a batch", line.custom_id)
    return line


def _custom_id(text: bytes) -> str | None:
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    name = found.get("custom_id") if isinstance(found, dict) else None
    return name if isinstance(name, str) else None


def _streams(body: msgspec.Raw) -> bool:
    try:
        found: Any = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False  # for the server to refuse
    return isinstance(found, dict) and found.get("stream") is True


class Batch:
    """A run over the lines of a file, which writes each answer as soon as it is there.

    Args:
        client: of the application.
        sink: receives the output.
        at_once: number of lines in progress together.

    Attributes:
        num_done, num_failed: lines so far, and those without a good answer.
    """

    def __init__(self, client: httpx2.AsyncClient, sink: BinaryIO, at_once: int) -> None:
        self._client = client
        self._sink = sink
        self._places = asyncio.Semaphore(at_once)
        self._seen: set[str] = set()
        self._bar = tqdm(unit=" lines", disable=None)
        self.num_done = self.num_failed = 0

    async def run(self, texts: Iterable[bytes | None]) -> None:
        """Answer all lines."""
        async with asyncio.TaskGroup() as group:
            for text in texts:
                await self._places.acquire()
                group.create_task(self._process(text))
        self._bar.close()

    async def _process(self, text: bytes | None) -> None:
        try:
            try:
                line = read_line(text)
                if line.custom_id in self._seen:
                    raise BadLine(
                        "duplicate_custom_id", "an earlier line has this custom_id", line.custom_id
                    )
                self._seen.add(line.custom_id)
                output = await self._answer(line)
            except BadLine as bad:
                output = _output(bad.custom_id, None, BatchError(bad.code, str(bad)))
        finally:
            self._places.release()
        is_good = output.response is not None and output.response.status_code == 200
        self.num_done += 1
        self.num_failed += not is_good
        self._sink.write(msgspec.json.encode(output) + b"\n")
        self._sink.flush()
        self._bar.update()

    async def _answer(self, line: Line) -> BatchOutput:
        headers = {"content-type": "application/json"}
        response = await self._client.post(line.url, content=bytes(line.body), headers=headers)
        request_id = response.headers.get("x-request-id", "")
        body = msgspec.Raw(response.content)
        return _output(line.custom_id, BatchResponse(response.status_code, request_id, body), None)


def _output(
    custom_id: str | None, response: BatchResponse | None, error: BatchError | None
) -> BatchOutput:
    return BatchOutput(f"batch_req_{uuid4().hex}", custom_id, response, error)


def run_batch(specs: Iterable[ModelSpec], config: ServerConfig, source: Path, sink: Path) -> int:
    """Answer the lines of a file into another, in the order in which the answers end.

    Returns:
        The exit status: 0 where every line has a good answer, else 1.

    Raises:
        OSError: a file cannot be read or written.
        CheckpointError, UnsupportedModel, ValueError: see `load_models`.
    """
    report = StartReport(sys.stderr)
    with source.open("rb") as file, sink.open("wb") as out:
        models = load_models(specs, config, report)
        try:
            batch = asyncio.run(_run(App(models, config), file, out))
        finally:
            models.close()
    failed = f", {batch.num_failed} of them without a good answer" if batch.num_failed else ""
    report.say(f"{batch.num_done} lines{failed}: {sink}")
    return 1 if batch.num_failed else 0


async def _run(app: App, file: BinaryIO, out: BinaryIO) -> Batch:
    transport = httpx2.ASGITransport(app.asgi, raise_app_exceptions=False)
    slots = sum(model.admission.num_slots for model in app.models.all)
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://127.0.0.1", timeout=None
    ) as client:
        batch = Batch(client, out, LINES_A_SLOT * slots)
        await batch.run(lines(file, LINE_FACTOR * app.config.max_body_bytes))
    return batch
