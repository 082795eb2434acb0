"""Schemas of files and batches."""

from __future__ import annotations

from typing import Literal

import msgspec

BatchEndpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]


class FileObject(msgspec.Struct, kw_only=True):
    """Description of a stored file in the files API. `filename` is a label without a meaning to the
    server.
    """

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"
    expires_at: int | None = None
    status_details: str | None = None


class DeletedFile(msgspec.Struct):
    """Answer of DELETE /v1/files/{file_id}, which confirms the deletion."""

    id: str
    object: str = "file"
    deleted: bool = True


class FileList(msgspec.Struct):
    """Answer of GET /v1/files: one page of the list of files."""

    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class ExpiresAfter(msgspec.Struct):
    anchor: Literal["created_at"]
    seconds: int


class BatchRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/batches, which starts a batch of requests from an input file."""

    input_file_id: str
    endpoint: BatchEndpoint
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchProblem(msgspec.Struct):
    """Error in a batch: an invalid line of its input file, or another reason for its failure."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchProblems(msgspec.Struct):
    data: list[BatchProblem]
    object: str = "list"


class RequestCounts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class CachedTokens(msgspec.Struct):
    cached_tokens: int = 0


class ReasoningTokens(msgspec.Struct):
    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct):
    """Token counts of a batch, summed over the answers to all of its requests."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    input_tokens_details: CachedTokens = msgspec.field(default_factory=CachedTokens)
    output_tokens_details: ReasoningTokens = msgspec.field(default_factory=ReasoningTokens)


class Batch(msgspec.Struct, kw_only=True):
    """Batch of requests from an input file, as the batches API describes it.

    Times are integer seconds since 1970.
    """

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    object: str = "batch"
    status: str = "validating"
    errors: BatchProblems | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None
    model: str | None = None
    usage: BatchUsage | None = None


class BatchList(msgspec.Struct):
    """Answer of GET /v1/batches: one page of the list of batches."""

    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class AnswerUsage(msgspec.Struct):
    """Token counts in an answer of any endpoint. Each count has a field per name that endpoints
    use.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None
    input_tokens_details: CachedTokens | None = None
    completion_tokens_details: ReasoningTokens | None = None
    output_tokens_details: ReasoningTokens | None = None


class AnswerCounts(msgspec.Struct):
    """Body of an answer of any endpoint, from which only the token counts are decoded."""

    usage: AnswerUsage | None = None


def add_usage(total: BatchUsage, body: bytes) -> None:
    """Add the token counts in the JSON body of an answer to the counts `total` of its batch.

    A body without readable token counts changes nothing.
    """
    try:
        usage = msgspec.json.decode(body, type=AnswerCounts).usage
    except msgspec.MsgspecError:
        return
    if usage is None:
        return
    read = usage.prompt_tokens + usage.input_tokens
    drawn = usage.completion_tokens + usage.output_tokens
    total.input_tokens += read
    total.output_tokens += drawn
    total.total_tokens += read + drawn
    for cached in (usage.prompt_tokens_details, usage.input_tokens_details):
        total.input_tokens_details.cached_tokens += cached.cached_tokens if cached else 0
    for thought in (usage.completion_tokens_details, usage.output_tokens_details):
        total.output_tokens_details.reasoning_tokens += thought.reasoning_tokens if thought else 0
