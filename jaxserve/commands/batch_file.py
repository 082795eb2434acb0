"""Implementation of `jaxserve run-batch`: answers from the application of the server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from tqdm import tqdm

from jaxserve.commands.server import load_models
from jaxserve.commands.start_output import StartOutput
from jaxserve.server.api.batch_service import InnerClient
from jaxserve.server.http.app import App
from jaxserve.server.kept import batch_lines
from jaxserve.server.served.models import NO_LIMIT, NO_SECONDS
from jaxserve.server.served.specs import ModelSpec
from jaxserve.server.settings import ServerConfig

# Lines in progress per slot of the engine, so that no slot waits for its next line.
LINES_A_SLOT = 2


def batch_config(**settings: Any) -> ServerConfig:
    """Return a ServerConfig with these settings for `jaxserve run-batch`.

    It has no queue limits and deadlines, since no other client waits, and stores no responses.
    """
    return ServerConfig(
        **settings,
        max_num_queued_reqs=NO_LIMIT,
        max_queued_prompt_tokens=NO_LIMIT,
        queue_timeout=NO_SECONDS,
        request_timeout=NO_SECONDS,
        max_stored_responses=0,
    )


class FileRun:
    """The answering of a batch file, which writes each answer when it is complete.

    Args:
        sink: the output file, in which each answer is a line of JSON.
        at_once: the most requests in progress.
    """

    def __init__(self, client: InnerClient, sink: BinaryIO, at_once: int) -> None:
        self._client = client
        self._sink = sink
        self._places = asyncio.Semaphore(at_once)
        self._seen: set[str] = set()
        self._bar = tqdm(unit=" lines", disable=None)
        self.num_done = self.num_failed = 0  # lines with an answer, and those whose request failed

    async def run(self, texts: Iterator[tuple[int, bytes | None]]) -> None:
        """Answer all lines of a batch file, and write the answers in the order of their completion.

        An invalid line or a repeated custom_id gets an error as its answer. A thread reads the
        lines, because a pipe may deliver them late.

        Args:
            texts: pairs (line number, bytes of the line, or None if the line is too long).
        """
        async with asyncio.TaskGroup() as group:
            while (line := await asyncio.to_thread(next, texts, None)) is not None:
                await self._places.acquire()
                group.create_task(self._process(*line))
        self._bar.close()

    async def _process(self, number: int, text: bytes | None) -> None:
        try:
            try:
                line = batch_lines.read_line(text)
                if line.custom_id in self._seen:
                    raise batch_lines.BadLine(
                        "duplicate_custom_id", "an earlier line has this custom_id", line.custom_id
                    )
                self._seen.add(line.custom_id)
                output = batch_lines.output_of(
                    line.custom_id, await self._client.answer(line), None
                )
            except batch_lines.BadLine as bad:
                output = batch_lines.output_of(
                    bad.custom_id, None, batch_lines.BatchError(bad.code, str(bad), number)
                )
        finally:
            self._places.release()
        self.num_done += 1
        self.num_failed += not output.is_good
        self._sink.write(msgspec.json.encode(output) + b"\n")
        self._sink.flush()
        self._bar.update()


def run_batch(specs: Iterable[ModelSpec], config: ServerConfig, source: Path, sink: Path) -> int:
    """Load models, answer the requests of a batch file in OpenAI's format, and write the answers.

    Answers are written in the order of their completion. The output file is opened after the models
    are loaded, so that a failed start keeps its contents.

    Args:
        source: the batch file, a request in JSON per line.
        sink: the output file.

    Returns:
        The exit status: 1 if a line failed, else 0.

    Raises:
        OSError: a file cannot be read or written.
        CheckpointError, UnsupportedModel, ValueError: see `load_models`.
    """
    output = StartOutput(sys.stderr)
    with source.open("rb") as file:
        models = load_models(specs, config, output)
        try:
            with sink.open("wb") as out:  # only now, so that a failed start keeps earlier answers
                batch = asyncio.run(_run(App(models, config), file, out))
        finally:
            models.close()
    failed = f", {batch.num_failed} of them without a good answer" if batch.num_failed else ""
    output.say(f"{batch.num_done} lines{failed}: {sink}")
    return 1 if batch.num_failed else 0


async def _run(app: App, file: BinaryIO, out: BinaryIO) -> FileRun:
    slots = sum(model.admission.num_slots for model in app.models.all)
    batch = FileRun(InnerClient(app.asgi, app.config, False), out, LINES_A_SLOT * slots)
    await batch.run(batch_lines.lines(file, batch_lines.LINE_FACTOR * app.config.max_body_bytes))
    return batch
