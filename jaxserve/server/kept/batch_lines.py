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
    """One request in the input file of a batch: its id, method, URL and JSON body.

    The body is forwarded unchanged.
    """

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BatchResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct, omit_defaults=True):
    """Reason why a request of a batch has no answer: code, message and line number."""

    code: str
    message: str
    line: int | None = None  # number of the line in its file, if known


class BatchOutput(msgspec.Struct):
    """Line of a batch's output file or error file: the answer to one request, of any status.

    A request without an answer has an error instead.
    """

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None

    @property
    def is_good(self) -> bool:
        """Whether the line contains an answer with status 200."""
        return self.response is not None and self.response.status_code == 200


class BadLine(Exception):
    """Exception for a line of a batch's input file that is not a valid request.

    Args:
        code: machine-readable name of the error.
        message: description of the error.
        custom_id: id that the line gives itself, if it can be read.
    """

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code  # machine-readable name of the error
        self.custom_id = custom_id  # name that the line gives itself, if it can be read


def lines(file: BinaryIO, most: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the non-blank lines of a file as pairs of the line's number and its bytes.

    Numbers start at 1 and count blank lines. A byte-order mark at the start of the file is removed.
    A line of more than `most` bytes is yielded as None.
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
    """Return the request in a line of a batch's input file.

    Args:
        text: the line, or None for a line that is too long.

    Raises:
        BadLine: the line is too long or malformed, has another method or an unknown URL, or asks
            for a stream or a background response.
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
    """Return the name of the model in the body of a batch's request, or None without a name."""
    name = _head(line.body).model
    return name if isinstance(name, str) else None


def output_of(
    custom_id: str | None, response: BatchResponse | None, error: BatchError | None
) -> BatchOutput:
    """Return a line of a batch's output with a new id.

    Args:
        custom_id: id that the batch's file gives to the request, if known.
        response: the answer, or None if there is an error.
        error: reason for a missing answer, or None.
    """
    return BatchOutput(f"batch_req_{uuid4().hex}", custom_id, response, error)


def _custom_id(text: bytes) -> str | None:
    try:
        document = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    name = document.get("custom_id") if isinstance(document, dict) else None
    return name if isinstance(name, str) else None


class _Head(msgspec.Struct):
    """Model and flags in the body of a batch's request, read before the body is forwarded."""

    model: Any = None
    stream: Any = None
    background: Any = None


def _head(body: msgspec.Raw) -> _Head:
    try:
        return msgspec.json.decode(body, type=_Head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Head()  # the server refuses it later


def scan(path: Path, endpoint: str, most: int, size: int) -> tuple[int, list[BatchProblem]]:
    """Check all lines of a batch's input file, and return their number and the errors in them.

    At most MAX_PROBLEMS errors are returned. A file without lines is an error. For a file with more
    than `most` lines, the result is `most + 1` and this one error.

    Args:
        path: path of the file.
        endpoint: URL that all requests must name.
        most: maximum number of lines.
        size: maximum number of bytes of a line.
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
    """Yield the error of each line of a batch's input file, or None for a valid line.

    A line must be a request to `endpoint` whose `custom_id` no earlier line has.

    Args:
        texts: the result of `lines`.
    """
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
    """Return a hash of 16 bytes of the `custom_id` of a batch's request."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
