"""Endpoints /v1/files and /v1/batches: uploaded files, and the batches that answer their lines."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import BinaryIO

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from jaxserve.errors import InvalidRequest
from jaxserve.server.api.endpoint_request import EndpointRequest
from jaxserve.server.api.query import Query
from jaxserve.server.api.streaming import json_response
from jaxserve.server.api.upload import Form, read_form
from jaxserve.server.kept.batches import Batches
from jaxserve.server.kept.files import FileStore, new_file
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.files import BatchList, BatchRequest, DeletedFile, FileList
from jaxserve.server.schema.responses import check_metadata

MOST_LISTED = 10_000
LEAST_SECONDS, MOST_SECONDS = 3600, 30 * 24 * 3600
# Bytes of a file that are read and sent at a time.
PIECE = 64 << 10
_OFF = "files and batches are off: start the server with --files-dir FOLDER, or use run-batch"


def _owner(request: Request) -> str | None:
    key: str | None = request.scope["jaxserve.key"]
    return None if key is None else hashlib.sha256(f"files\0{key}".encode()).hexdigest()[:32]


def _files(request: Request) -> FileStore:
    files: FileStore | None = request.app.state.served.files
    if files is None:
        raise ApiError(404, _OFF, code="not_supported")
    return files


def _batches(request: Request) -> Batches:
    _files(request)
    return request.app.state.served.batches


async def upload_file(request: Request) -> Response:
    """Endpoint `POST /v1/files`: store the file of a form, and answer with its description.

    Raises:
        ApiError: the form is malformed or too slow, or there is no room for the file.
        InvalidRequest: the file is missing, or the purpose is not "batch".
    """
    files = _files(request)
    with files.receive(_owner(request)) as upload:
        form = await read_form(request, upload, files.config.body_timeout)
        if form.filename is None:
            raise InvalidRequest("file is missing", "file")
        if form.fields.get("purpose") != "batch":
            raise InvalidRequest("purpose must be batch", "purpose")
        file = new_file(form.filename, "batch", _seconds(form))
        await asyncio.to_thread(upload.flush, file)
        return json_response(upload.keep())


def _seconds(form: Form) -> int | None:
    name = "expires_after"
    anchor, text = (form.fields.get(f"{name}[{part}]") for part in ("anchor", "seconds"))
    if anchor is None and text is None:
        return None
    is_number = text is not None and text.isascii() and text.isdecimal() and len(text) < 10
    if anchor != "created_at" or text is None or not is_number:
        raise InvalidRequest(f"{name} must have anchor created_at, and seconds", name)
    return _checked_seconds(int(text), name)


def _checked_seconds(seconds: int, name: str) -> int:
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise InvalidRequest(
            f"{name}: seconds must be from {LEAST_SECONDS} to {MOST_SECONDS}, got {seconds}", name
        )
    return seconds


async def list_files(request: Request) -> Response:
    """Endpoint `GET /v1/files`: answer with a page of the client's files, the newest first.

    The query argument `purpose` selects uploaded files or outputs of batches.
    """
    query = Query(request)
    purpose = query.choice("purpose", ("batch", "batch_output"))
    listed = _files(request).list(_owner(request), purpose)
    page = query.page(listed, lambda file: file.id, "desc", MOST_LISTED, MOST_LISTED)
    return json_response(FileList(*page))


async def get_file(request: Request) -> Response:
    """Endpoint `GET /v1/files/{file_id}`: answer with the description of a stored file."""
    record = _files(request).get(request.path_params["file_id"], _owner(request))
    return json_response(record.file)


async def delete_file(request: Request) -> Response:
    """Endpoint `DELETE /v1/files/{file_id}`: delete a stored file.

    Raises:
        ApiError: 404, the client has no such file.
        InvalidRequest: an unfinished batch reads the file.
    """
    files = _files(request)
    name = files.get(request.path_params["file_id"], _owner(request)).file.id
    reader = _batches(request).reader_of(name)
    if reader is not None:
        raise InvalidRequest(f"the file is read by {reader}: cancel it first", "file_id")
    files.remove(name)
    return json_response(DeletedFile(name))


async def get_content(request: Request) -> Response:
    """Endpoint `GET /v1/files/{file_id}/content`: answer with the bytes of a stored file."""
    files = _files(request)
    record = files.get(request.path_params["file_id"], _owner(request))
    headers = {"content-length": str(record.file.bytes), "x-content-type-options": "nosniff"}
    source = files.path(record.file.id).open("rb")  # can be read even after a deletion
    return StreamingResponse(_pieces(source), 200, headers, "application/octet-stream")


async def _pieces(source: BinaryIO) -> AsyncIterator[bytes]:
    with source:
        while piece := source.read(PIECE):
            yield piece


async def create_batch(request: Request) -> Response:
    """Endpoint `POST /v1/batches`: create a batch, and answer with its description.

    The batch starts at once.
    """
    batches = _batches(request)
    body = EndpointRequest(request).parse(BatchRequest)
    check_metadata(body.metadata)
    if body.output_expires_after is not None:
        _checked_seconds(body.output_expires_after.seconds, "output_expires_after")
    return json_response(await batches.create(body, _owner(request)))


async def list_batches(request: Request) -> Response:
    """Endpoint `GET /v1/batches`: answer with a page of the client's batches, the newest first."""
    listed = _batches(request).list(_owner(request))
    page = Query(request).page(listed, lambda batch: batch.id, "desc")
    return json_response(BatchList(*page))


async def get_batch(request: Request) -> Response:
    """Endpoint `GET /v1/batches/{batch_id}`: answer with the description of a batch."""
    return json_response(_batches(request).get(request.path_params["batch_id"], _owner(request)))


async def cancel_batch(request: Request) -> Response:
    """Endpoint `POST /v1/batches/{batch_id}/cancel`: begin to cancel a batch.

    The answer is the batch's description. It does not wait for the end of the batch.

    Raises:
        ApiError: 404, the client has no such batch.
        InvalidRequest: the batch has ended.
    """
    name = request.path_params["batch_id"]
    return json_response(await _batches(request).cancel(name, _owner(request)))
