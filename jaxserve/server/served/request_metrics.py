"""Metrics of the server's requests: plain counters that are cheap to update.

vLLM's buckets are from its `v1/metrics/buckets.py` (0.33). A histogram uses our bounds and vLLM's
together, and each of its two names shows its own bounds.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import count, takewhile

from jaxserve.engine.metrics import SequenceTimes, ValueCounts
from jaxserve.server.schema.openai import PerRequestMetrics


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
LONG = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKENS = tuple(float(2**power) for power in range(20))

VLLM_FIRST_TOKEN = _bounds(
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 "
    "80.0 160.0 640.0 2560.0"
)
VLLM_BETWEEN_TOKENS = _bounds(
    "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
)
VLLM_LATENCY = _bounds(
    "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 "
    "960.0 1920.0 7680.0"
)
NUM_COMPLETIONS = (1.0, 2.0, 5.0, 10.0, 20.0)
NUM_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
# vLLM's finish reasons that also occur here. Each has a time series from the start.
REASONS = ("stop", "length", "abort", "error")


def vllm_tokens(most: int) -> tuple[float, ...]:
    """Return a tuple of the bounds of vLLM's token buckets: 1, 2, 5, 10, 20, ... up to `most`."""
    steps = (mantissa * 10.0**power for power in count() for mantissa in (1, 2, 5))
    return tuple(takewhile(lambda step: step <= most, steps))


class Distribution(ValueCounts):
    """Histogram of a metric, which is shown with jaxserve's bucket bounds and with vLLM's.

    Args:
        name: name of the metric, without a prefix.
        text: description of the metric.
        ours: ascending upper bounds of the buckets under jaxserve's name.
        theirs: ascending upper bounds of the buckets under vLLM's name.
    """

    def __init__(
        self, name: str, text: str, ours: tuple[float, ...], theirs: tuple[float, ...]
    ) -> None:
        super().__init__(sorted({*ours, *theirs}))
        self.name, self.text = name, text  # name without a prefix, and description
        self.ours, self.theirs = ours, theirs


def per_request_metrics(times: SequenceTimes | None, num_tokens: int) -> PerRequestMetrics:
    """Return the times of a finished completion for the `metrics` field of an answer.

    The rules are those of vLLM's `build_per_request_timing_metrics`.

    Args:
        times: times of the completion's sequence. With None, all fields of the result are unset.
        num_tokens: number of generated tokens.
    """
    if times is None:
        return PerRequestMetrics()
    metrics = PerRequestMetrics(
        time_to_first_token_ms=times.prefill * 1000,
        generation_time_ms=times.decode * 1000,
        queue_time_ms=times.queue * 1000,
    )
    if num_tokens > 1:
        metrics.mean_itl_ms = times.decode / (num_tokens - 1) * 1000
    if times.inference > 0:
        metrics.tokens_per_second = num_tokens / times.inference
    return metrics


class RequestMetrics:
    """Histograms and counters of one model's requests since the server's start.

    Times are in seconds.

    Args:
        max_model_len: maximum number of tokens of a sequence, which bounds vLLM's token buckets.
    """

    def __init__(self, max_model_len: int = 1 << 19) -> None:
        latency = partial(Distribution, ours=LONG, theirs=VLLM_LATENCY)
        gap = partial(Distribution, ours=SHORT, theirs=VLLM_BETWEEN_TOKENS)
        tokens = partial(Distribution, ours=TOKENS, theirs=vllm_tokens(max_model_len))
        self.time_to_first_token = Distribution(
            "time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            SHORT,
            VLLM_FIRST_TOKEN,
        )
        self.inter_token_latency = gap(
            "inter_token_latency_seconds", "Between tokens of a request."
        )
        self.time_per_output_token = gap(
            "request_time_per_output_token_seconds", "Mean time between tokens of a completion."
        )
        self.e2e_latency = latency(
            "e2e_request_latency_seconds", "From a completion's arrival to its end."
        )
        self.queue_time = latency(
            "request_queue_time_seconds",
            "From a completion's arrival at the engine to its first slot.",
        )
        self.prefill_time = latency(
            "request_prefill_time_seconds", "From a completion's first slot to its first token."
        )
        self.decode_time = latency(
            "request_decode_time_seconds", "From a completion's first token to its last."
        )
        self.inference_time = latency(
            "request_inference_time_seconds", "From a completion's first slot to its last token."
        )
        self.prompt_tokens = tokens("request_prompt_tokens", "Prompt tokens of a request.")
        self.computed_tokens = tokens(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a completion that were computed, not found in the prefix cache.",
        )
        self.generation_tokens = tokens(
            "request_generation_tokens", "Tokens drawn for a completion."
        )
        self.most_generation_tokens = tokens(
            "request_max_num_generation_tokens", "Tokens of a request's longest completion."
        )
        self.max_tokens = tokens(
            "request_params_max_tokens", "The max_tokens of a completion's request."
        )
        self.num_completions = Distribution(
            "request_params_n", "Completions of a request.", NUM_COMPLETIONS, NUM_COMPLETIONS
        )
        self.num_preemptions = Distribution(
            "request_num_preemptions",
            "Times that a completion was sent back to wait.",
            NUM_PREEMPTIONS,
            NUM_PREEMPTIONS,
        )
        self.prompt_computed = 0  # prompt tokens that were computed, of requests with a first token
        # Prompt tokens found in the prefix cache, of requests with a first token.
        self.prompt_cached = 0
        # Number of completions by finish reason.
        self.endings: Counter[str] = Counter(dict.fromkeys(REASONS, 0))

    @property
    def histograms(self) -> list[Distribution]:
        """All histograms of the model's requests, in the same order for all models."""
        return [value for value in vars(self).values() if isinstance(value, Distribution)]

    def tokens(self, since_start: float, since_last: float | None, count: int) -> None:
        """Record that generated tokens of a completion have arrived.

        Args:
            since_start: seconds since the request started.
            since_last: seconds since the completion's previous tokens, or None for its first
                tokens.
            count: number of the tokens that have arrived together.
        """
        if since_last is None:
            self.time_to_first_token.add(since_start)
        else:
            self.inter_token_latency.add(since_last / count, count)

    def started(self, prompt: int, cached: int) -> None:
        """Record a prompt of `prompt` tokens, of which the prefix cache contained `cached`."""
        self.prompt_computed += prompt - cached
        self.prompt_cached += cached

    def finished(
        self,
        seconds: float,
        times: SequenceTimes,
        prompt: int,
        cached: int,
        generated: int,
        max_tokens: int | None,
    ) -> None:
        """Record the times and token counts of a completion that has ended with a token.

        Args:
            seconds: time from the arrival of its request to its end.
            times: times of its sequence in the engine.
            prompt: number of prompt tokens.
            cached: number of prompt tokens found in the prefix cache.
            generated: number of generated tokens.
            max_tokens: limit set by the request, or None.
        """
        self.e2e_latency.add(seconds)
        self.queue_time.add(times.queue)
        self.prefill_time.add(times.prefill)
        self.decode_time.add(times.decode)
        self.inference_time.add(times.inference)
        self.time_per_output_token.add(times.decode / max(1, generated - 1))
        self.num_preemptions.add(times.num_preemptions)
        self.prompt_tokens.add(prompt)
        self.computed_tokens.add(prompt - cached)
        self.generation_tokens.add(generated)
        if max_tokens is not None:
            self.max_tokens.add(max_tokens)

    def completed(self, completions: int, most: int) -> None:
        """Record that all completions of a request have ended.

        Args:
            completions: number of completions.
            most: number of generated tokens of the longest completion.
        """
        self.num_completions.add(completions)
        self.most_generation_tokens.add(most)

    def ended(self, reason: str, count: int) -> None:
        self.endings[reason] += count
