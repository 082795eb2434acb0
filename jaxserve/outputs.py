"""Outputs of the engine, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural log-probability, its rank (1 is the most likely) and its text.

    The text is None without a tokenizer, or with `detokenize=False`.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One completion of a prompt, complete or so far.

    `logprobs` has a dict for each token, with its own Logprob first and then the Logprobs of the
    most likely tokens, by their ids. `cumulative_logprob` is the sum over the tokens. Both are None
    unless the request set logprobs. `error` is the reason of the finish_reason "error", or of
    "abort" if the engine was closed or stopped. Text and tokens before the error are present.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestStateStats:
    """Times of a request and counts of its tokens, with vLLM's names.

    `arrival_time` is of the wall clock (`time.time`). The other times are of `time.monotonic`: when
    the engine accepted the request, gave it the first slot, and read its first and last token. For
    several completions they are the earliest times, and the end of the last completion. They are 0
    until a completion has ended. `first_token_latency` is in seconds, from `queued_ts`.
    """

    num_generation_tokens: int = 0
    num_preemptions: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0


@dataclass
class RequestOutput:
    """The answer of a request: complete from `LLM`, the part since the last one from `AsyncLLM`.

    `num_cached_tokens` counts the prompt tokens whose keys and values were in the prefix cache.
    `error` is the error of the first failed completion, or None. A failed request does not raise,
    so that other requests of a call keep their answers. `prompt_logprobs`, if requested, has an
    entry for each token of the prompt, with None for the first. `metrics` are complete in the last
    output of a request.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestStateStats | None = None


@dataclass
class BeamSearchSequence:
    """A sequence of a beam search: tokens and text of the prompt and the answer together.

    `logprobs` has a dict of the candidates for each generated token, by their ids. `cum_logprob` is
    the sum over the tokens, including one that ended the sequence.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The sequences of a beam search, the best one first."""

    sequences: list[BeamSearchSequence]
