"""Inputs of the engine: SamplingParams, BeamSearchParams, and the checked Request.

Names and defaults of the fields follow vLLM. Results are in `outputs.py`.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.settings.checks import exact_int, finite_float, flag, is_listing, within
from jaxserve.structured import NAME as STRUCTURED
from jaxserve.structured import StructuredOutputsParams

MAX_CHOICES = 128
MAX_STOP_STRINGS = 128
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 32
MIN_TEMPERATURE = 1e-4
MAX_TEMPERATURE = 100.0
# The device computes in float32 and treats smaller numbers as zero.
MIN_TOP_P = 1.1755e-38
MAX_CACHE_SALT_CHARS = 128
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_LOGIT_BIAS = 100.0
MAX_BIASED_TOKENS = 300
MAX_ALLOWED_TOKEN_IDS = 2**20
# Largest number of alternatives from the device. The host computes more, if the engine allows it.
MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORDS = 1000
MAX_BAD_WORD_CHARS = 256
# After tokenization: most sequences of two or more tokens, and most tokens of a sequence.
MAX_BAD_WORDS_TOKENIZED = 256
MAX_BAD_WORD_TOKENS = 16


class StopStrings:
    """Index of the stop strings of a request, which finds the first one in a growing text.

    Text arrives piece by piece, and only matches that end in the newest piece are searched. Each
    character of that piece selects the stop strings that end with it, so the time per token hardly
    depends on the number of strings.

    Args:
        strings: one or more stop strings, each with one or more characters.

    Attributes:
        longest: number of characters of the longest stop string.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._sorted = sorted(set(strings))
        self.longest = max(map(len, self._sorted))
        self._first_characters = frozenset(string[0] for string in self._sorted)
        self._by_end: dict[str, tuple[str, ...]] = {}
        for string in self._sorted:
            self._by_end[string[-1]] = (*self._by_end.get(string[-1], ()), string)

    def find(self, text: str, start: int, settled: int) -> tuple[int, str] | None:
        """Return the start index and the stop string of the first match in a text, or None.

        Of several matches that begin at the smallest index, the shortest is returned.

        Args:
            text: the text to search.
            start: smallest index at which a match may begin.
            settled: number of characters before the newest piece, in which no match may end.
        """
        if self._by_end.keys().isdisjoint(text[settled:]):
            return None
        best: tuple[int, int] | None = None
        for end in range(settled + 1, len(text) + 1):
            if best is not None and end - self.longest > best[0]:
                break  # all further matches begin later
            strings = self._by_end.get(text[end - 1])
            if strings is not None and text.endswith(strings, start, end):
                matches = [(end - len(s), len(s)) for s in strings if text.endswith(s, start, end)]
                best = min(matches) if best is None else min(best, *matches)
        if best is None:
            return None
        place, length = best
        return place, text[place : place + length]

    def first_beginning(self, text: str, start: int) -> int:
        """Return the smallest index from which the text may be the beginning of a stop string.

        `text[index:]` then begins a stop string that further text may complete. The result is
        `len(text)` if there is no such index. A match in any longer text begins at the result or
        later, so the next search may start there.

        Args:
            text: the text to examine.
            start: smallest index to consider.
        """
        for place in range(max(start, len(text) - self.longest + 1), len(text)):
            if text[place] not in self._first_characters:
                continue
            rest = text[place:]
            # Longer strings that begin with `rest` follow it in sorted order.
            following = bisect_right(self._sorted, rest)
            if following < len(self._sorted) and self._sorted[following].startswith(rest):
                return place
        return len(text)


class FinishReason(enum.StrEnum):
    """The reason why a sequence ended: "stop", "length", "abort" or "error"."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplerFeature(enum.IntFlag):
    """Flags of the sampling features that cost extra work, such as penalties, biases and logprobs.

    A request has the flags of the features that it uses (`SamplingParams.features`).
    """

    PENALTIES = 1
    ALLOWED = 2
    BANNED = 4
    BIAS = 8
    # Features that change logits by data of the request on the device.
    EDITS = PENALTIES | ALLOWED | BANNED | BIAS
    LOGPROBS = 16
    PROMPT_LOGPROBS = 32
    # The host computes log-probabilities of drawn tokens from logits.
    LOGITS = 64
    SCORES = LOGPROBS | PROMPT_LOGPROBS | LOGITS
    # The most likely tokens are returned beside sampled tokens, or beside tokens of the prompt.
    ALTERNATIVES = 128
    PROMPT_ALTERNATIVES = 256


@dataclass(frozen=True)
class SamplingParams:
    """Settings of the sampling, the length and the format of the answers to one prompt.

    Args:
        n: number of independent completions of the prompt, 1 to 128. Choice i uses `seed + i`.
        temperature: 0 to 100. Values below 0.0001 are 0, greedy decoding.
        top_p: sample from the smallest set of tokens whose probability reaches this value, 0 to 1.
            Below 1.1755e-38 this is the most likely token, so that `temperature` becomes 0.
        top_k: number of most likely tokens to sample from. 0 or -1 is all tokens.
        min_p: smallest probability of a token relative to the most likely token, 0 to 1.
        seed: -2**63 to 2**64 - 1. Negative values count modulo 2**64, except -1, which is None.
            None draws a seed from the engine's seed.
        stop: string, or up to 128 strings, that end the text. The text excludes them unless
            `include_stop_str_in_output` is set.
        stop_token_ids: token ids that end the sequence, besides the model's end-of-sequence tokens.
        ignore_eos: continue after the model's end-of-sequence tokens.
        max_tokens: largest number of generated tokens. None is the rest of the model's context.
        min_tokens: number of tokens before the sequence may end, at most `max_tokens`. As in vLLM,
            the end of the context ends the sequence earlier.
        detokenize: whether outputs contain text.
        skip_special_tokens: whether special tokens are omitted from the text.
        spaces_between_special_tokens: whether a special token after another one keeps the spaces
            that the tokenizer puts before it, if such tokens are part of the text.
        include_stop_str_in_output: whether a matched stop string is part of the text.
        presence_penalty: subtracted from the logit of each generated token, -2 to 2.
        frequency_penalty: subtracted once for each occurrence of a generated token, -2 to 2.
        repetition_penalty: divides positive logits of tokens of the prompt and the output, and
            multiplies negative logits, 0.01 to 100. 1 has no effect.
        logit_bias: numbers from -100 to 100 that are added to the logits of up to 300 tokens.
        allowed_token_ids: the only tokens that may be generated, or None.
        bad_words: strings that may not be generated. The token that would complete a string is
            excluded, at the start of a word and in the middle of a text.
        logprobs: number of most likely tokens whose log-probabilities outputs contain, besides
            those of the generated tokens. -1 is all, None omits log-probabilities. The limit is the
            engine's `max_logprobs`, and its `logprobs_mode` selects raw or processed values.
        prompt_logprobs: like `logprobs`, for each token of the prompt except the first.
        logprob_token_ids: up to 128 token ids, whose log-probabilities outputs contain instead of
            the most likely tokens. `logprobs` is then None or their number.
        structured_outputs: the format that the text must have.
        thinking_token_budget: number of tokens after which thinking is ended, for a model whose
            thinking can be recognized. None is no limit.

    Attributes:
        features: flags of `SamplerFeature` for settings of extra cost (not of settings of
            prompts).

    Raises:
        InvalidRequest: on construction, names the first invalid field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Listing[str] | None = None
    stop_token_ids: Listing[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Listing[int] | None = None
    bad_words: Listing[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Listing[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    features: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        self._check_basics(put)
        for name, low, high in (
            ("presence_penalty", -MAX_PENALTY, MAX_PENALTY),
            ("frequency_penalty", -MAX_PENALTY, MAX_PENALTY),
            ("repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        ):
            put(name, within(getattr(self, name), name, low, high))
        put("logit_bias", _logit_bias(self.logit_bias))
        put("allowed_token_ids", _allowed_token_ids(self.allowed_token_ids))
        put("bad_words", _bad_words(self.bad_words))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                put(name, exact_int(getattr(self, name), name, -1, 2**31 - 1))
        put("logprob_token_ids", _logprob_token_ids(self.logprob_token_ids, self.logprobs))
        name = "thinking_token_budget"
        if self.thinking_token_budget is not None:
            put(name, exact_int(self.thinking_token_budget, name, 0, 2**31 - 1))
        form = self.structured_outputs
        if form is not None and not isinstance(form, StructuredOutputsParams):
            raise InvalidRequest(
                f"{STRUCTURED} must be StructuredOutputsParams, got {type(form).__name__}",
                STRUCTURED,
            )
        put("features", self._features())

    @cached_property
    def stop_strings(self) -> StopStrings | None:
        """The index of the request's stop strings, created once, or None without stop strings."""
        return StopStrings(self.stop) if self.stop else None

    @property
    def _scores_on_host(self) -> bool:
        count = 0 if self.logprobs is None else self.logprobs
        return bool(self.logprob_token_ids) or not 0 <= count <= MAX_LOGPROBS

    def _features(self) -> int:
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        uses = {
            SamplerFeature.PENALTIES: penalties != (0.0, 0.0, 1.0),
            SamplerFeature.ALLOWED: bool(self.bad_words)
            or self.allowed_token_ids is not None
            or self.structured_outputs is not None
            or self.thinking_token_budget is not None,
            SamplerFeature.BANNED: bool(self.bad_words),
            SamplerFeature.BIAS: bool(self.logit_bias),
            SamplerFeature.LOGPROBS: self.logprobs is not None and not self._scores_on_host,
            SamplerFeature.LOGITS: self._scores_on_host,
            SamplerFeature.ALTERNATIVES: bool(self.logprobs) and not self._scores_on_host,
        }
        return int(sum(feature for feature, is_used in uses.items() if is_used))

    def _check_basics(self, put: Callable[[str, Any], None]) -> None:
        put("n", exact_int(self.n, "n", 1, MAX_CHOICES))
        put("temperature", _temperature(self.temperature))
        for name in ("top_p", "min_p"):
            put(name, within(getattr(self, name), name, 0.0, 1.0))
        if self.top_p < MIN_TOP_P:
            put("temperature", 0.0)
        put("top_k", max(0, exact_int(self.top_k, "top_k", -1, 2**31 - 1)))
        if self.seed is not None:
            seed = exact_int(self.seed, "seed", -(2**63), 2**64 - 1)
            put("seed", None if seed == -1 else seed % 2**64)
        put("stop", _stop_strings(self.stop))
        put("stop_token_ids", _stop_token_ids(self.stop_token_ids))
        if self.max_tokens is not None:
            put("max_tokens", exact_int(self.max_tokens, "max_tokens", 1, 2**31 - 1))
        put("min_tokens", exact_int(self.min_tokens, "min_tokens", 0, 2**31 - 1))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
                "min_tokens",
            )
        for name in ("ignore_eos", "detokenize", "skip_special_tokens"):
            flag(getattr(self, name), name)
        for name in ("spaces_between_special_tokens", "include_stop_str_in_output"):
            flag(getattr(self, name), name)
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop strings need detokenize=True", "stop")


def _temperature(value: Any) -> float:
    number = within(value, "temperature", 0.0, MAX_TEMPERATURE)
    return 0.0 if number < MIN_TEMPERATURE else number


def _stop_strings(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise InvalidRequest("stop must be a string or a list of strings", "stop")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop takes at most {MAX_STOP_STRINGS} strings", "stop")
    if not all(1 <= len(s) <= MAX_STOP_STRING_CHARS for s in strings):
        raise InvalidRequest(
            f"each stop string must have 1 to {MAX_STOP_STRING_CHARS} characters", "stop"
        )
    return tuple(strings)


def _logit_bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    name = "logit_bias"
    if not isinstance(value, Mapping):
        kind = type(value).__name__
        raise InvalidRequest(f"{name} must map token ids to numbers, got {kind}", name)
    if len(value) > MAX_BIASED_TOKENS:
        raise InvalidRequest(f"{name} takes at most {MAX_BIASED_TOKENS} tokens", name)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # JSON has no integer keys: OpenAI's clients send decimal strings.
        decimal = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 12
        token = exact_int(int(key) if decimal else key, f"{name}: a token id", 0, 2**31 - 1, name)
        number = finite_float(bias, name)
        if abs(number) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"{name} must be from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}, got {number} "
                f"for token {token}",
                name,
            )
        if token in biases:
            raise InvalidRequest(f"{name} names token {token} twice", name)
        biases[token] = number
    return biases


def _allowed_token_ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    name = "allowed_token_ids"
    if not is_listing(value):
        raise InvalidRequest(f"{name} must be a list of token ids", name)
    if not 1 <= len(value) <= MAX_ALLOWED_TOKEN_IDS:
        raise InvalidRequest(f"{name} takes 1 to {MAX_ALLOWED_TOKEN_IDS} token ids", name)
    return tuple(dict.fromkeys(exact_int(token, name, 0, 2**31 - 1) for token in value))


def _logprob_token_ids(value: Any, logprobs: int | None) -> tuple[int, ...]:
    name = "logprob_token_ids"
    if value is None:
        return ()
    if not is_listing(value):
        raise InvalidRequest(f"{name} must be a list of token ids", name)
    if len(value) > MAX_LOGPROB_TOKEN_IDS:
        raise InvalidRequest(f"{name} takes at most {MAX_LOGPROB_TOKEN_IDS} token ids", name)
    if len(value) and logprobs not in (None, len(value)):
        raise InvalidRequest(
            f"{name} has {len(value)} token ids, and logprobs must be None or their number, "
            f"got {logprobs}",
            name,
        )
    return tuple(dict.fromkeys(exact_int(token, name, 0, 2**31 - 1) for token in value))


def _bad_words(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    name = "bad_words"
    if not isinstance(value, list | tuple) or not all(isinstance(s, str) for s in value):
        raise InvalidRequest(f"{name} must be a list of strings", name)
    if len(value) > MAX_BAD_WORDS:
        raise InvalidRequest(f"{name} takes at most {MAX_BAD_WORDS} strings", name)
    if not all(len(s) <= MAX_BAD_WORD_CHARS and s.strip() for s in value):
        raise InvalidRequest(
            f"each of {name} must have 1 to {MAX_BAD_WORD_CHARS} characters, not all of them "
            "spaces",
            name,
        )
    return tuple(dict.fromkeys(value))


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not is_listing(value):
        raise InvalidRequest("stop_token_ids must be a list of token ids", "stop_token_ids")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS}", "stop_token_ids")
    return tuple(exact_int(token, "stop_token_ids", 0, 2**31 - 1) for token in value)


@dataclass(frozen=True)
class BeamSearchParams:
    """Settings of a beam search, with vLLM's names.

    Args:
        beam_width: number of sequences that each step keeps and that the result has, 1 to 128. Each
            step compares `2 * beam_width` next tokens of every sequence, which must not exceed the
            engine's `max_logprobs`.
        max_tokens: largest number of generated tokens of a sequence, one per step.
        ignore_eos: continue after the model's end-of-sequence tokens.
        temperature: divides logits if the engine's `logprobs_mode` is a processed one.
        length_penalty: exponent from -16 to 16. The score of a sequence is the sum of its
            log-probabilities divided by (number of generated tokens) ** length_penalty.
        include_stop_str_in_output: has no effect. The tokens of a sequence always include the
            end-of-sequence token that ended it.
        skip_special_tokens: whether special tokens are omitted from the text.
        allowed_token_ids: up to 128 token ids that are the only candidates, or None for all tokens.

    Raises:
        InvalidRequest: on construction. The error names the first invalid field.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: Listing[int] | None = None

    def __post_init__(self) -> None:
        exact_int(self.beam_width, "beam_width", 1, MAX_CHOICES)
        exact_int(self.max_tokens, "max_tokens", 1, 2**31 - 1)
        within(self.length_penalty, "length_penalty", -16.0, 16.0)
        checked = SamplingParams(
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            allowed_token_ids=self.allowed_token_ids,
        )
        name = "allowed_token_ids"
        if len(checked.allowed_token_ids or ()) > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidRequest(
                f"{name} takes at most {MAX_LOGPROB_TOKEN_IDS} token ids in a beam search", name
            )
        object.__setattr__(self, name, checked.allowed_token_ids)


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request: token ids of one prompt, sampling settings, seed, limits and priority.

    `RequestFactory.make` creates it after checks against the engine's limits.
    """

    request_id: str  # name that the caller has chosen
    prompt_token_ids: Any  # int32[prompt length], read-only
    sampling: SamplingParams  # settings, which several requests may share
    seed: int  # the final seed. Requests with equal seeds draw equal random numbers.
    # All token ids that end a completion, those of the model included.
    stop_token_ids: tuple[int, ...]
    max_length: int  # largest number of tokens of prompt and output together
    priority: int = 0  # under the priority policy, requests with lower values run first
    arrival_time: float = 0.0  # seconds of `time.monotonic`
    cache_salt: str = ""  # the request shares cached pages only with requests of an equal salt
    # Token sequences of `sampling.bad_words`. The last token of a sequence is excluded after the
    # tokens before it.
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    # Initial state of the grammar of `sampling.structured_outputs`, which each completion copies,
    # or None.
    constraint: Any = None
