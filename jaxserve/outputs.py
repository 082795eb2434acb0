"""Outputs of the engine: the types that callers receive, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural log-probability, its rank (1 is the most likely) and its text.

    The text is None where there is no tokenizer, or with `detokenize=False`.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One completion of a prompt, as far as it has come.

    `logprobs` has, for each token, that token's Logprob first and then those of the most likely
    ones by their ids; `cumulative_logprob` is the sum over the tokens. Both are None unless the
    request asked for logprobs. `error` says why it ended with finish_reason "error" (or, where
    the engine closed or was stopped, "abort"); its text and tokens are what came before.
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

    `arrival_time` is the wall clock's (`time.time`), the others are of `time.monotonic`: when the
    engine took the request in, gave it its first slot, and read its first and its last token; of
    several completions the earliest, and the last one's end. They are 0 until a token has ended a
    completion. `first_token_latency` is in seconds, from `queued_ts` on.
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
    """A request's answer: complete from `LLM`, what is new since the last from `AsyncLLM`.

    `num_cached_tokens` counts the prompt tokens whose KV was found in the prefix cache.
    `error` is that of the first completion that failed, None where none has: one failed request
    raises nothing, so that others in the same call keep their answers. `prompt_logprobs`, where
    they were asked for, has an entry for each prompt token, the first of them None. `metrics` are
    complete in a request's last output.
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
    """A sequence that a beam search found: tokens and text of prompt and answer together.

    `logprobs` has, for each generated token, the candidates at its place by their ids;
    `cum_logprob` is the sum over the tokens, an ending one included.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The best sequences of a beam search, the best one first."""

    sequences: list[BeamSearchSequence]
