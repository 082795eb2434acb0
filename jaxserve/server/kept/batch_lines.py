"""Lines of OpenAI's batch files: requests, and their answers."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import Any, BinaryIO, get_args
from uuid import uuid4

import msgspec

from jaxserve.server.schema.files import BatchEndpoint

URLS: tuple[str, ...] = get_args(BatchEndpoint)
# The longest line in units of the largest body, whose characters may be written as escapes.
LINE_FACTOR = 2
MAX_CUSTOM_ID = 512


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


class BatchError(msgspec.Struct, omit_defaults=True):
    """Reason for no answer; `line` is the number of the line in its file, where it is known."""

    code: str
    message: str
    line: int | None = None


class BatchOutput(msgspec.Struct):
    """A line of the output: the answer, whatever its status, or the reason for none."""

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None

    @property
    def is_good(self) -> bool:
        """Return whether it holds a good answer."""
        return self.response is not None and self.response.status_code == 200


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


def lines(file: BinaryIO, most: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines that are not blank with their numbers from 1, without a byte-order mark.

    In place of a line of more than `most` bytes stands None.
    """
    number = 0
    while line := file.readline(most + 1):
        number += 1
        if len(line) > most:
            while line and not line.endswith(b"\n"):
                line = file.readline(most)
            yield number, None
            continue
        if number == 1:
            line = line.removeprefix(BOM_UTF8)
        if line.strip():
            yield number, line


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
    if len(line.custom_id) > MAX_CUSTOM_ID:
        raise BadLine("invalid_line", f"custom_id has more than {MAX_CUSTOM_ID} characters")
    if line.method != "POST":
        raise BadLine(
            "invalid_method", f"method must be POST, got {line.method[:40]!r}", line.custom_id
        )
    if line.url not in URLS:
        allowed = ", ".join(URLS)
        raise BadLine(
            "invalid_url", f"url must be one of {allowed}; got {line.url[:80]!r}", line.custom_id
        )
    head = _head(line.body)
    for name in ("stream", "background"):
        if getattr(head, name) is True:
            raise BadLine("invalid_request", f"{name} is not possible in a batch", line.custom_id)
    return line


def model_of(line: Line) -> str | None:
    """Return the name of the model of a request; None where it names none."""
    name = _head(line.body).model
    return name if isinstance(name, str) else None


def output_of(
    custom_id: str | None, response: BatchResponse | None, error: BatchError | None
) -> BatchOutput:
    """Return a line of the output, with an id of its own."""
    return BatchOutput(f"batch_req_{uuid4().hex}", custom_id, response, error)


def _custom_id(text: bytes) -> str | None:
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    name = found.get("custom_id") if isinstance(found, dict) else None
    return name if isinstance(name, str) else None


class _Head(msgspec.Struct):
    """The fields of a body that matter before it is sent."""

    model: Any = None
    stream: Any = None
    background: Any = None


def _head(body: msgspec.Raw) -> _Head:
    try:
        return msgspec.json.decode(body, type=_Head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Head()  # for the server to refuse
