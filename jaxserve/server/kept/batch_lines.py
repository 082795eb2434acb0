"""Parsing of request lines in OpenAI's batch files, and the lines of answers."""

from __future__ import annotations

import hashlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, get_args
from uuid import uuid4

import msgspec

from jaxserve.server.schema.files import BatchEndpoint, BatchProblem

URLS: tuple[str, ...] = get_args(BatchEndpoint)
# Maximum line length as a multiple of the maximum body, whose characters may be escaped.
LINE_FACTOR = 2
MAX_CUSTOM_ID = 512
# Maximum number of invalid lines that are reported.
MAX_PROBLEMS = 100


class Line(msgspec.Struct):
    """Request in a batch file. Its body is forwarded unchanged."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BatchResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct, omit_defaults=True):
    """Reason for a missing answer."""

    code: str
    message: str
    line: int | None = None  # number of the line in its file, if known


class BatchOutput(msgspec.Struct):
    """Line of the output file: an answer of any status, or the error for a missing answer."""

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None

    @property
    def is_good(self) -> bool:
        """Return whether the line contains an answer with status 200."""
        return self.response is not None and self.response.status_code == 200


class BadLine(Exception):
    """A line is not a valid request."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code  # machine-readable name of the error
        self.custom_id = custom_id  # name that the line gives itself, if it can be read


def lines(file: BinaryIO, most: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the non-blank lines of a file with their numbers, from 1, without a byte-order mark.

    A line of more than `most` bytes is None.
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
    """Parse a line as a request.

    Raises:
        BadLine: the message says why the line is invalid.
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
    """Return the name of the model in a request, or None."""
    name = _head(line.body).model
    return name if isinstance(name, str) else None


def output_of(
    custom_id: str | None, response: BatchResponse | None, error: BatchError | None
) -> BatchOutput:
    """Return a line of the output with a new id."""
    return BatchOutput(f"batch_req_{uuid4().hex}", custom_id, response, error)


def _custom_id(text: bytes) -> str | None:
    try:
        document = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    name = document.get("custom_id") if isinstance(document, dict) else None
    return name if isinstance(name, str) else None


class _Head(msgspec.Struct):
    """Fields of a body that are checked before it is forwarded."""

    model: Any = None
    stream: Any = None
    background: Any = None


def _head(body: msgspec.Raw) -> _Head:
    try:
        return msgspec.json.decode(body, type=_Head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Head()  # the server refuses it later


def scan(path: Path, endpoint: str, most: int, size: int) -> tuple[int, list[BatchProblem]]:
    """Return the number of lines of a batch file, and the errors in them.

    A line must name `endpoint` and have at most `size` bytes. The file has at most `most` lines.
    """
    problems: list[BatchProblem] = []
    total = 0
    with path.open("rb") as file:
        for problem in _problems(lines(file, size), endpoint):
            total += 1
            if total > most:
                return total, [BatchProblem("too_many_lines", f"more than {most} lines")]
            if problem is not None and len(problems) < MAX_PROBLEMS:
                problems.append(problem)
    if not total:
        problems.append(BatchProblem("empty_file", "the file has no lines"))
    return total, problems


def _problems(
    texts: Iterator[tuple[int, bytes | None]], endpoint: str
) -> Iterator[BatchProblem | None]:
    """Yield the error of each line, or None for a valid line."""
    seen: set[bytes] = set()
    for number, text in texts:
        try:
            line = read_line(text)
        except BadLine as bad:
            yield BatchProblem(bad.code, str(bad)[:600], number)
            continue
        if line.url != endpoint:
            message = f"url must be the batch's endpoint, {endpoint}"
            yield BatchProblem("mismatched_url", message, number, "url")
        elif (mark := mark_of(line.custom_id)) in seen:
            message = "an earlier line has this custom_id"
            yield BatchProblem("duplicate_custom_id", message, number, "custom_id")
        else:
            seen.add(mark)
            yield None


def mark_of(custom_id: str) -> bytes:
    """Return a short hash of a line's `custom_id`."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
