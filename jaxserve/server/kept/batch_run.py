"""BatchRun: execution of one batch. Answers are written to disk at once and survive a restart."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol
from uuid import uuid4

import msgspec

from jaxserve.server.kept import batch_lines
from jaxserve.server.kept.batch_lines import mark_of
from jaxserve.server.kept.files import FileRecord, FileStore, new_file
from jaxserve.server.schema.files import (
    Batch,
    BatchProblem,
    BatchProblems,
    BatchUsage,
    RequestCounts,
    add_usage,
)

# Number of answered lines that are skipped without yielding to the event loop.
SKIPPED_A_TURN = 64
# Ids of the output file and the error file of a batch, None for files that do not exist.
Outputs = tuple[str | None, str | None]


class Service(Protocol):
    """Interface of a service that answers requests of batches, after those of other clients."""

    async def answer(
        self, line: batch_lines.Line, owner: str | None = None
    ) -> batch_lines.BatchResponse:
        """Return the answer to a request of a batch. Errors are answers with their status.

        Args:
            line: the request.
            owner: digest of the API key of the batch's client, or None.
        """
        ...

    def is_alive(self, model: str | None) -> bool:
        """Return whether the engine of the model with this name runs. None is the default model."""
        ...

    async def enter(self, model: str | None) -> None:
        """Wait until `model` has a request place that other clients do not need, and take it.

        A place admits one request of a batch. None is the default model.
        """
        ...

    def leave(self, model: str | None) -> None:
        """Release the request place of `model` that `enter` took. None is the default model."""
        ...


def append(sink: BinaryIO, data: bytes) -> None:
    """Append bytes to an unbuffered file. If the write fails, cut the file to its former size.

    Raises:
        OSError: the write failed.
    """
    end, rest = os.fstat(sink.fileno()).st_size, memoryview(data)
    try:
        while rest:
            rest = rest[sink.write(rest) :]
    except OSError:
        with suppress(OSError):  # the next start removes an incomplete line
            sink.truncate(end)
        raise


class BatchRun:
    """Execution of one batch: it answers the requests of the input file, and collects the answers.

    Args:
        batch: the batch, whose counts, usage and errors are updated.
        owner: digest of the API key of the batch's client, or None.
        folder: folder for the two files in which answers and errors are collected.
        store: store of the input file and, at the end, of the output files.
        service: service that answers the requests.
    """

    def __init__(
        self, batch: Batch, owner: str | None, folder: Path, store: FileStore, service: Service
    ) -> None:
        self._batch = batch
        self._owner = owner
        self._store = store
        self._service = service
        self._paths = [folder / f"{batch.id}.{end}" for end in ("output", "error")]
        self._sinks: list[BinaryIO] = []
        self._seen: set[bytes] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._drawing: asyncio.Task[None] | None = None
        self._is_full = False
        self._problem: OSError | None = None
        self._num_bytes = 0

    def interrupt(self) -> None:
        """Stop the execution of the batch now. Requests in progress get no answers."""
        if self._drawing is not None:
            self._drawing.cancel()

    async def draw(self, most: int) -> None:
        """Answer all requests without an answer, until the batch is cancelled or expires.

        Answers are appended to the batch's two files. If the batch expires, the time is set in the
        batch, and each request without an answer gets an error.

        Args:
            most: maximum number of bytes of a line of the input file.

        Raises:
            OSError: the disk failed.
        """
        await asyncio.to_thread(self._resume)
        self._store.count(self._owner, self._num_bytes)
        batch = self._batch
        self._sinks = [path.open("ab", buffering=0) for path in self._paths]
        try:
            if batch.status != "cancelling" and self._store.has(batch.input_file_id):
                self._drawing = asyncio.ensure_future(self._lines(most))
                seconds = batch.expires_at - time.time()
                await asyncio.wait({self._drawing}, timeout=max(0.0, seconds))
                if self._drawing.done() and not self._drawing.cancelled():
                    self._drawing.result()
            if batch.status != "cancelling" and time.time() >= batch.expires_at:
                await self._halt()
                batch.expired_at = int(time.time())
                await self._expire(most)
            for sink in self._sinks:
                await asyncio.to_thread(os.fsync, sink.fileno())
            if self._problem is not None:
                raise self._problem
        finally:
            await self._halt()
            for sink in self._sinks:
                sink.close()

    async def _halt(self) -> None:
        tasks = [*self._tasks] + ([self._drawing] if self._drawing else [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _lines(self, most: int) -> None:
        with self._store.path(self._batch.input_file_id).open("rb") as source:
            for number, text in batch_lines.lines(source, most):
                line = batch_lines.read_line(text)  # validated before
                if mark_of(line.custom_id) in self._seen:
                    if not number % SKIPPED_A_TURN:
                        await asyncio.sleep(0)
                    continue
                model = batch_lines.model_of(line)
                await self._service.enter(model)
                task = asyncio.ensure_future(self._answer(line))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                task.add_done_callback(lambda _, model=model: self._service.leave(model))
        await asyncio.gather(*self._tasks)

    async def _answer(self, line: batch_lines.Line) -> None:
        response = await self._service.answer(line, self._owner)
        has_failed = response.status_code >= 500
        if response.status_code == 503 or (
            has_failed and not self._service.is_alive(batch_lines.model_of(line))
        ):
            # The server is stopping, or the engine has stopped: the line is answered after a
            # restart.
            await asyncio.Event().wait()
        self._write(batch_lines.output_of(line.custom_id, response, None))

    def _write(self, output: batch_lines.BatchOutput) -> None:
        """Append an answer to the file of good answers or of errors, and count it in the batch.

        The first failure to write ends the execution, also if the owner's space for files is used
        up.
        """
        if self._is_full or self._problem is not None:
            return
        data = msgspec.json.encode(output) + b"\n"
        if len(data) > self._store.room(self._owner):
            self._is_full = True
            message = "its output and all files take more than --max-files-bytes"
            if self._store.config.num_keys > 1:
                message += ", of which each key has an equal part"
            self._batch.errors = BatchProblems([BatchProblem("storage_full", message)])
            self.interrupt()
            return
        try:
            append(self._sinks[0 if output.is_good else 1], data)
        except OSError as error:
            self._problem = error
            self.interrupt()
            return
        self._num_bytes += len(data)
        self._store.count(self._owner, len(data))
        self._count(output)

    def _count(self, output: batch_lines.BatchOutput) -> None:
        counts = self._batch.request_counts
        self._seen.add(mark_of(output.custom_id or ""))
        if output.is_good and output.response is not None:
            counts.completed += 1
            usage = self._batch.usage = self._batch.usage or BatchUsage()
            add_usage(usage, bytes(output.response.body))
        else:
            counts.failed += 1

    def _resume(self) -> None:
        """Set the batch's counts, usage and bytes from the files of a run before a restart.

        An incomplete last line is removed from a file.
        """
        batch = self._batch
        batch.request_counts = RequestCounts(batch.request_counts.total)
        batch.usage = None
        for path in self._paths:
            if not path.exists():
                continue
            end = 0
            with path.open("rb+") as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._count(msgspec.json.decode(line, type=batch_lines.BatchOutput))
                    end += len(line)
                file.truncate(end)
            self._num_bytes += end

    async def _expire(self, most: int) -> None:
        problem = batch_lines.BatchError(
            "batch_expired", "This request could not be executed before the window expired."
        )
        with self._store.path(self._batch.input_file_id).open("rb") as source:
            for number, text in batch_lines.lines(source, most):
                if not number % SKIPPED_A_TURN:
                    await asyncio.sleep(0)
                line = batch_lines.read_line(text)
                if mark_of(line.custom_id) not in self._seen:
                    self._write(batch_lines.output_of(line.custom_id, None, problem))

    def name_outputs(self) -> Outputs:
        """Return new file ids for the batch's output file and error file, None for an empty one."""
        good, bad = (
            f"file-{uuid4().hex}" if path.exists() and path.stat().st_size else None
            for path in self._paths
        )
        return good, bad

    async def keep_outputs(self, names: Outputs, seconds: int | None) -> None:
        """Move the batch's collected answers into the file store, and set its output file ids.

        Files that are already in the store are skipped.

        Args:
            names: ids from `name_outputs`.
            seconds: time until the files expire, or None.

        Raises:
            OSError: the disk failed. The call can be repeated.
        """
        batch, store = self._batch, self._store
        noted: list[tuple[Path, FileRecord]] = []
        for path, name in zip(self._paths, names, strict=True):
            if name is not None and path.exists():
                file = new_file(
                    f"{batch.id}_{path.suffix[1:]}.jsonl", "batch_output", seconds, name
                )
                noted.append((path, await asyncio.to_thread(store.note, path, file, self._owner)))
        for path, record in noted:
            store.adopt(path, record)
        store.count(self._owner, -self._num_bytes)
        self._num_bytes = 0
        for path in self._paths:
            path.unlink(missing_ok=True)
        stored = [name if name is not None and store.has(name) else None for name in names]
        batch.output_file_id, batch.error_file_id = stored
