"""Outputs of the engine, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """Score of one token: natural log-probability, rank (1 is the most likely token) and text.

    The text `decoded_token` is None without a tokenizer, or if the request has `detokenize=False`.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One of the `n` completions of a prompt, either complete or as far as it has been generated.

    Attributes:
        index: number of the completion, from 0 to n - 1.
        text, token_ids: the generated text and tokens, also those before an error.
        finish_reason: "stop", "length", "abort" or "error", or None while the completion runs.
        stop_reason: stop token id or stop string that ended the completion, or None.
        cumulative_logprob: sum of the log-probabilities of the generated tokens.
        logprobs: for each generated token a dict by token id: the Logprob of the token itself, then
            of the most likely tokens. Both are None unless the request has `logprobs`.
        error: message for finish_reason "error", or for "abort" because the engine ended.
        weight_versions: pairs of the index of a token in the completion and the version of the
            weights that computed it and the tokens after it, up to the next pair.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None
    weight_versions: list[tuple[int, str]] = field(default_factory=list)

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestStateStats:
    """Statistics of one request, with vLLM's names: times, generated tokens and preemptions.

    `arrival_time` is a time of `time.time`. The other times are of `time.monotonic`: `queued_ts`
    when the engine accepted the request, `scheduled_ts` when it got its first slot,
    `first_token_ts` and `last_token_ts` when its first and last token were read. They are 0 until a
    completion has ended. Of several completions, `scheduled_ts` and `first_token_ts` are the
    smallest times and `last_token_ts` is the largest. `first_token_latency` is the time from
    `queued_ts` to `first_token_ts` in seconds.
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
    """The output of one request: a prompt and its completions, with their text and tokens.

    `LLM` returns one complete output per prompt. `AsyncLLM` yields several outputs per request, and
    each holds only the text and tokens since the previous one.

    Attributes:
        prompt: text of the prompt, or None if the caller passed token ids.
        outputs: the completions of the prompt.
        finished: whether all completions have ended.
        num_cached_tokens: prompt tokens whose keys and values were in the prefix cache.
        error: message of the first failed completion, or None. A failed request raises no
            exception, so that the other requests of the call keep their outputs.
        prompt_logprobs: for each prompt token a dict of Logprobs by token id, None for the first
            token. None unless the request has `prompt_logprobs`.
        metrics: statistics of the request, complete in its last output.
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
    """One sequence of a beam search: the prompt, and the tokens that the search has generated.

    Attributes:
        tokens: token ids of prompt and continuation together.
        logprobs: for each generated token a dict of the Logprobs of its candidates, by token id.
        cum_logprob: sum of the log-probabilities of the generated tokens.
        text: text of `tokens`, or None without a tokenizer.
        finish_reason: "stop" after an end token, otherwise "length". None for a prompt alone.
        stop_reason: id of the token that ended the sequence, or None.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The result of a beam search for one prompt: its sequences, the best score first."""

    sequences: list[BeamSearchSequence]
