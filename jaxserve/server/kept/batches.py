"""Batches: files of requests, answered with the lowest priority. Their state is stored on disk."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from uuid import uuid4

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.server.kept.batch_lines import LINE_FACTOR, scan
from jaxserve.server.kept.batch_run import BatchRun, Outputs, Service
from jaxserve.server.kept.files import FileStore, may_see, read_records, write_record
from jaxserve.server.kept.shares import over_share
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.files import Batch, BatchProblem, BatchProblems, BatchRequest

_log = logging.getLogger(__name__)
UNENDED = ("validating", "in_progress", "finalizing", "cancelling")
WINDOW_SECONDS = 24 * 3600
# Delay between attempts to store answers on a failing disk.
RETRY_SECONDS = 10.0


class BatchRecord(msgspec.Struct):
    """Stored state of a batch: the batch as clients see it, its owner and its output files' ids."""

    batch: Batch
    owner: str | None  # API key of the client
    output_seconds: int | None  # time until its output files expire, or None
    outputs: Outputs = (None, None)  # ids of its output and error file, once it is finalizing


class Batches:
    """The batches of a server, stored in the folder of the file store and executed as tasks.

    Each API key may have an equal share of `max_batches` unfinished batches. If there are more than
    `max_files` batches, the oldest finished one of the key with the most batches is removed.

    Args:
        files: store of the input and output files.
        service: service that answers the requests of batches.

    Raises:
        OSError: the stored records cannot be read.
    """

    def __init__(self, files: FileStore, service: Service) -> None:
        self._store = files
        self._config = files.config
        self._service = service
        self._folder = files.folder / "batches"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._records = read_records(self._folder, BatchRecord)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._runs: dict[str, BatchRun] = {}
        self._saving = asyncio.Lock()

    def start(self) -> None:
        """Start tasks for the unfinished batches of an earlier process."""
        for record in self._sorted():
            if record.batch.status in UNENDED:
                self._begin(record)

    async def stop(self) -> None:
        """Cancel the tasks of all batches, and wait for them. The next start continues the work."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _sorted(self) -> list[BatchRecord]:
        # Batches created in the same second keep their order.
        return sorted(self._records.values(), key=lambda r: r.batch.created_at)

    def _begin(self, record: BatchRecord) -> None:
        name = record.batch.id
        task = asyncio.ensure_future(self._run(record))
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    async def create(self, request: BatchRequest, owner: str | None) -> Batch:
        """Create a batch, store its record, start its task, and return the batch.

        Args:
            request: body of the client's request.
            owner: digest of the client's API key, or None.

        Raises:
            ApiError: 404, the input file does not exist. 429, the client has too many unfinished
                batches.
            InvalidRequest: the purpose of the input file is not "batch".
        """
        name = "input_file_id"
        file = self._store.get(request.input_file_id, owner, name).file
        if file.purpose != "batch":
            raise InvalidRequest(f"{name}: the purpose of the file must be batch", name)
        most = self._config.share(self._config.max_batches)
        batches = [r.batch for r in self._records.values() if r.owner == owner]
        if sum(batch.status in UNENDED for batch in batches) >= most:
            whose = "" if self._config.num_keys == 1 else " of this key"
            raise ApiError(
                429,
                f"{most} batches{whose} have not ended",
                code="too_many_batches",
                headers={"retry-after": "60"},
            )
        now = int(time.time())
        batch = Batch(
            id=f"batch_{uuid4().hex}",
            endpoint=request.endpoint,
            input_file_id=file.id,
            completion_window=request.completion_window,
            created_at=now,
            expires_at=now + WINDOW_SECONDS,
            metadata=request.metadata,
        )
        after = request.output_expires_after
        record = BatchRecord(batch, owner, after.seconds if after else None)
        self._records[batch.id] = record  # reserves the place and the input file
        try:
            await self._save(record)
        except BaseException:
            del self._records[batch.id]
            raise
        self._forget_oldest()
        self._begin(record)
        return batch

    def get(self, name: str, client: str | None) -> Batch:
        """Return the batch with the id `name`, if the client may see it (see `may_see`).

        Args:
            client: digest of the client's API key, or None.

        Raises:
            ApiError: 404, there is no such batch.
        """
        record = self._records.get(name)
        if record is None or not may_see(record.owner, client):
            raise ApiError(404, f"No batch found with id {name[:60]!r}", "batch_id", "not_found")
        return record.batch

    def list(self, client: str | None) -> list[Batch]:
        """Return the batches that a client may see (see `may_see`), the oldest first."""
        return [r.batch for r in self._sorted() if may_see(r.owner, client)]

    async def cancel(self, name: str, client: str | None) -> Batch:
        """Begin to cancel a batch: set and store the status "cancelling", and stop its requests.

        Existing answers are kept. The result is the batch.

        Args:
            name: id of the batch.
            client: digest of the client's API key, or None.

        Raises:
            ApiError: 404, there is no such batch.
            InvalidRequest: the batch is finalizing or has ended.
        """
        batch = self.get(name, client)
        if batch.status not in ("validating", "in_progress", "cancelling"):
            raise InvalidRequest(f"a batch that is {batch.status} cannot be cancelled", "batch_id")
        if batch.status != "cancelling":
            batch.status, batch.cancelling_at = "cancelling", int(time.time())
            await self._save(self._records[name])
            if name in self._runs:
                self._runs[name].interrupt()
        return batch

    def reader_of(self, file_id: str) -> str | None:
        """Return the id of an unfinished batch with this input file, or None."""
        for name, record in self._records.items():
            if record.batch.input_file_id == file_id and record.batch.status in UNENDED:
                return name
        return None

    async def _save(self, record: BatchRecord) -> None:
        async with self._saving:  # so that the newest state is written last
            path = self._folder / f"{record.batch.id}.json"
            await asyncio.to_thread(write_record, path, record)

    def _forget_oldest(self) -> None:
        num_batches = Counter(record.owner for record in self._records.values())
        while over := over_share(num_batches, self._config.max_files):
            ended = [r for r in self._sorted() if r.batch.status not in UNENDED]
            record = next((r for owner in over for r in ended if r.owner == owner), None)
            if record is None:
                return
            num_batches[record.owner] -= 1
            name = record.batch.id
            del self._records[name]
            (self._folder / f"{name}.json").unlink(missing_ok=True)

    async def _run(self, record: BatchRecord) -> None:
        """Execute a batch from its current state to its end: validate, answer, store outputs."""
        batch = record.batch
        try:
            if batch.status == "validating" and not await self._validate(record):
                return
            most = LINE_FACTOR * self._config.max_body_bytes
            run = BatchRun(record.batch, record.owner, self._folder, self._store, self._service)
            self._runs[batch.id] = run
            if batch.status != "finalizing":
                if not self._store.has(batch.input_file_id):
                    self._report(record, "no_file", "the input file is no longer there")
                try:
                    await run.draw(most)
                except OSError as error:
                    self._report(record, "storage", f"the disk refuses: {error.strerror}")
                batch.status, batch.finalizing_at = "finalizing", int(time.time())
                record.outputs = run.name_outputs()
            await self._keep_outputs(record, run)
            await self._end(record)
        except Exception as error:
            _log.error("batch %s failed: %s", batch.id, type(error), exc_info=error)
            self._report(record, "internal_error", "the server failed at this batch")
            await self._end(record)
        finally:
            self._runs.pop(batch.id, None)

    async def _keep_outputs(self, record: BatchRecord, run: BatchRun) -> None:
        # Retried until the disk accepts them, so that answers are not lost.
        while True:
            try:
                await self._save(record)
                await run.keep_outputs(record.outputs, record.output_seconds)
                return
            except OSError as error:
                _log.error("batch %s: its answers wait for the disk: %s", record.batch.id, error)
            await asyncio.sleep(RETRY_SECONDS)

    def _report(self, record: BatchRecord, code: str, message: str) -> None:
        problems = record.batch.errors or BatchProblems([])
        problems.data.append(BatchProblem(code, message))
        record.batch.errors = problems

    async def _end(self, record: BatchRecord) -> None:
        """Set the final status of a batch and the time of its end, and store the batch's record.

        The status is "failed", "cancelled", "expired" or "completed". A failure to write is logged.
        """
        batch, now = record.batch, int(time.time())
        if batch.errors is not None:
            batch.status, batch.failed_at = "failed", now
        elif batch.cancelling_at is not None:
            batch.status, batch.cancelled_at = "cancelled", now
        elif batch.expired_at is not None:
            batch.status = "expired"
        else:
            batch.status, batch.completed_at = "completed", now
        try:
            await self._save(record)
        except OSError as error:
            _log.error("batch %s: its end cannot be written: %s", batch.id, error)

    async def _validate(self, record: BatchRecord) -> bool:
        """Check all lines of a batch's input file, and store the new state of the batch.

        Returns:
            Whether the batch continues. A batch with errors has ended as failed.
        """
        batch = record.batch
        if not self._store.has(batch.input_file_id):
            return True
        path, most = self._store.path(batch.input_file_id), self._config.max_batch_lines
        size = LINE_FACTOR * self._config.max_body_bytes
        total, problems = await asyncio.to_thread(scan, path, batch.endpoint, most, size)
        batch.request_counts.total = total
        if problems:
            batch.errors = BatchProblems(problems)
            await self._end(record)
            return False
        if batch.status == "validating":  # it may have been cancelled in the meantime
            batch.status, batch.in_progress_at = "in_progress", int(time.time())
        await self._save(record)
        return True
