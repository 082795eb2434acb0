"""Parser of forms with a file (multipart/form-data), whose file is written to disk on arrival."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from jaxserve.server.api.streaming import ClientGone
from jaxserve.server.kept.files import Upload
from jaxserve.server.schema.errors import ApiError

MAX_PARTS, MAX_FIELD_BYTES, MAX_FILENAME = 16, 1024, 255
# The least rate of an upload, in bytes per second. A slower upload is refused.
MIN_RATE = 64 << 10


@dataclass
class _Part:
    """One part of a multipart form: a text field, or the uploaded file."""

    headers: dict[bytes, bytes] = field(default_factory=dict)
    name: str = ""
    is_file: bool = False
    value: bytes = b""


class Form:
    """Parser of a multipart form with text fields and one file, fed with bytes as they arrive.

    `fields` and `filename` hold the results.

    Args:
        boundary: the form's boundary, from the Content-Type header.
        upload: receives the bytes of the file.
    """

    def __init__(self, boundary: bytes, upload: Upload) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None  # name of the file, or None until the file begins
        self.is_whole = False  # whether the end of the form has been parsed
        self._upload = upload
        self._part = _Part()
        self._num_parts = 0
        self._header = self._text = b""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._read_name,
                "on_header_value": self._read_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._read_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> None:
        """Parse the next bytes of the form: collect text fields, and pass the file's bytes on.

        Raises:
            ApiError: the form is malformed, or a part of it is too large.
        """
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise ApiError(400, f"the form is malformed: {error}", code="bad_form") from None

    def _begin(self) -> None:
        self._part = _Part()
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise ApiError(400, f"the form has more than {MAX_PARTS} parts", code="bad_form")

    def _read_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _read_value(self, data: bytes, start: int, end: int) -> None:
        self._text += data[start:end]

    def _end_header(self) -> None:
        self._part.headers[self._header.lower()] = self._text
        self._header = self._text = b""

    def _end_headers(self) -> None:
        kind, options = parse_options_header(self._part.headers.get(b"content-disposition"))
        if kind != b"form-data" or b"name" not in options:
            raise ApiError(400, "a part of the form has no name", code="bad_form")
        self._part.name = options[b"name"].decode(errors="replace")
        self._part.is_file = b"filename" in options or self._part.name == "file"
        if not self._part.is_file:
            return
        if self._part.name != "file" or self.filename is not None:
            raise ApiError(400, "the form takes one file, named file", "file", "bad_form")
        label = options.get(b"filename", b"").decode(errors="replace")
        clean = "".join(letter if letter.isprintable() else "_" for letter in label)
        self.filename = clean[:MAX_FILENAME] or "file"

    def _read_data(self, data: bytes, start: int, end: int) -> None:
        part = self._part
        if part.is_file:
            self._upload.write(data[start:end])
            return
        part.value += data[start:end]
        if len(part.value) > MAX_FIELD_BYTES:
            name = part.name[:60]
            raise ApiError(400, f"{name} is longer than {MAX_FIELD_BYTES} bytes", name, "bad_form")

    def _end_part(self) -> None:
        if not self._part.is_file:
            self.fields[self._part.name] = self._part.value.decode(errors="replace")

    def _end(self) -> None:
        self.is_whole = True


async def read_form(request: Request, upload: Upload, seconds: float) -> Form:
    """Read the multipart form in a request's body to its end, and return the parsed form.

    The bytes of its file are written to `upload`.

    Args:
        request: the HTTP request, whose body is unread.
        upload: upload in progress.
        seconds: time limit, to which the time of the file's bytes at MIN_RATE is added.

    Raises:
        ApiError: the form is malformed, too large or too slow.
        ClientGone: the client disconnected.
    """
    _, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if not 1 <= len(boundary) <= 200:
        raise ApiError(400, "Content-Type needs a boundary", code="bad_form")
    form = Form(boundary, upload)
    async for data in body_pieces(request, seconds):
        form.feed(data)
    if not form.is_whole:
        raise ApiError(400, "the form has no end", code="bad_form")
    return form


async def body_pieces(request: Request, seconds: float) -> AsyncIterator[bytes]:
    """Yield the bytes of a request's body as they arrive.

    Args:
        request: the HTTP request, whose body is unread.
        seconds: time limit, to which the time of the received bytes at MIN_RATE is added.

    Raises:
        ApiError: 408, the body is too slow.
        ClientGone: the client disconnected.
    """
    received, began, is_more = 0, time.monotonic(), True
    while is_more:
        limit = began + seconds + received / MIN_RATE - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, limit)):
                message = await request.receive()
        except TimeoutError:
            raise ApiError(408, "the body comes too slowly", code="body_timeout") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        data: bytes = message.get("body", b"")
        received += len(data)
        is_more = message.get("more_body", False)
        if not is_more:
            request.scope["jaxserve.body"] = b""  # marks the body as read: the connection stays
        yield data
