"""RequestFactory: validates a caller's arguments and creates a Request that can be served."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import replace
from typing import Any

import numpy as np

from jaxserve.engine.prompts import check_token_ids, encoded
from jaxserve.errors import InvalidRequest, PromptTooLong
from jaxserve.request import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS_TOKENIZED,
    MAX_CACHE_SALT_CHARS,
    MAX_STOP_TOKEN_IDS,
    Request,
    SamplingParams,
)
from jaxserve.settings.checks import exact_int
from jaxserve.start.plan.limits import Limits
from jaxserve.structured import NAME as STRUCTURED
from jaxserve.text.grammars import Constraint, Grammars
from jaxserve.text.thinking import ThinkingConstraint, ThinkingMarks
from jaxserve.text.tokenizer import Tokenizer

Encode = Callable[[str], list[int]]


class RequestFactory:
    """The thread-safe factory of an engine's requests, which validates the caller's arguments.

    Args:
        tokenizer: encodes prompts and bad_words. None if all prompts are token ids.
        grammars: compiles structured_outputs. None without a tokenizer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: Limits,
        grammars: Grammars | None,
        default_sampling: SamplingParams,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._grammars = grammars
        self._default_sampling = default_sampling
        self._numbers = itertools.count()

    def make(
        self,
        prompt: Any,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        number: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        thinking: ThinkingMarks | None = None,
    ) -> Request:
        """Validate the arguments of a request, fill in defaults, and return the Request.

        The request is not started. Its answer is limited to the rest of the context.

        Args:
            prompt: text or token ids.
            sampling: the sampling parameters, or None for the defaults.
            request_id: an id, by default unique in this factory.
            number: the position in the order of arrival, counted by default. If `sampling` has no
                seed, the seed follows from this number and the engine's seed.
            priority: lower values are served earlier under the priority policy.
            cache_salt: cached pages are shared only between requests with equal salts.
            thinking: the markers of the answer's thoughts, after which structured_outputs apply.
                None for a model without thoughts.

        Raises:
            InvalidRequest: an argument is invalid. The message names the field and the allowed
                values.
        """
        number = next(self._numbers) if number is None else number
        tokenizer, limits = self._tokenizer, self._limits
        prompt = encoded(prompt, tokenizer)
        sampling = self._default_sampling if sampling is None else sampling
        if not isinstance(sampling, SamplingParams):
            kind = type(sampling).__name__
            raise InvalidRequest(f"sampling_params must be SamplingParams, got {kind}")
        ids = check_token_ids(prompt, limits.vocab_size)
        length = _answer_length(len(ids), sampling, limits)
        if sampling.min_tokens > length:
            sampling = replace(sampling, min_tokens=length)
        check_logprobs(sampling, limits)
        stop_token_ids = _stop_token_ids(sampling, limits)
        encode = None if tokenizer is None else tokenizer.encode_word
        bad_words = bad_words_token_ids(sampling.bad_words or (), encode, limits.vocab_size)
        _check_tokens_are_left(sampling, bad_words, stop_token_ids, limits.vocab_size)
        return Request(
            request_id=f"request-{number}" if request_id is None else request_id,
            prompt_token_ids=ids,
            sampling=sampling,
            seed=_seed(sampling, limits, number),
            stop_token_ids=stop_token_ids,
            max_length=len(ids) + length,
            priority=exact_int(priority, "priority", -(2**31), 2**31 - 1),
            arrival_time=time.monotonic(),
            cache_salt=_checked_salt(cache_salt),
            bad_words_token_ids=bad_words,
            constraint=self._constraint(sampling, thinking),
        )

    def _constraint(
        self, sampling: SamplingParams, thinking: ThinkingMarks | None
    ) -> Constraint | ThinkingConstraint | None:
        form, budget = sampling.structured_outputs, sampling.thinking_token_budget
        if form is not None and self._grammars is None:
            raise InvalidRequest(
                f"this engine has no tokenizer, which {STRUCTURED} needs", STRUCTURED
            )
        if budget is not None and thinking is None:
            raise InvalidRequest(
                "thinking_token_budget needs a model whose reasoning is known (reasoning_parser)",
                "thinking_token_budget",
            )
        inner = None if form is None or self._grammars is None else self._grammars.compile(form)
        if thinking is None or thinking.is_closed or (inner is None and budget is None):
            return inner
        limits = self._limits
        # One launch is in flight while the next one is scheduled.
        ahead = 2 * limits.launch_steps
        ends = limits.eos_token_ids
        return ThinkingConstraint(thinking, budget, inner, limits.vocab_size, ends, ahead)


def _answer_length(prompt_length: int, sampling: SamplingParams, limits: Limits) -> int:
    # PromptTooLong: the prompt leaves no room for an answer.
    longest = limits.max_model_len - 1
    if prompt_length > longest:
        raise PromptTooLong(
            f"prompt has {prompt_length} tokens; at most {longest} leave room for an answer within "
            f"max_model_len ({limits.max_model_len})",
            "prompt",
        )
    room = limits.max_model_len - prompt_length
    return room if sampling.max_tokens is None else min(sampling.max_tokens, room)


def check_logprobs(sampling: SamplingParams, limits: Limits) -> None:
    """Check that the log-probabilities that a request asks for are within the engine's limits.

    Raises:
        InvalidRequest: logprobs or prompt_logprobs exceeds max_logprobs, or logprob_token_ids has
            an unknown token or needs logits that the engine does not keep. The message names the
            field.
    """
    most = limits.vocab_size if limits.max_logprobs == -1 else limits.max_logprobs
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(sampling, name)
        if name == "logprobs" and sampling.logprob_token_ids:
            continue
        count = limits.vocab_size if count == -1 else count
        if count is not None and count > most:
            raise InvalidRequest(
                f"{name} must be from 0 to {most}, the engine's max_logprobs, got "
                f"{getattr(sampling, name)}",
                name,
            )
    name = "logprob_token_ids"
    for token in sampling.logprob_token_ids or ():
        exact_int(token, name, 0, limits.vocab_size - 1)
    if sampling.logprob_token_ids and not limits.keeps_logits:
        raise InvalidRequest(
            f"{name} needs logits that this engine's programs do not keep: start it with "
            "max_logprobs above 20, or -1, on one host",
            name,
        )


def _checked_salt(cache_salt: Any) -> str:
    salt = "" if cache_salt is None else cache_salt
    if not isinstance(salt, str) or len(salt) > MAX_CACHE_SALT_CHARS or not salt.isprintable():
        raise InvalidRequest(
            f"cache_salt must be at most {MAX_CACHE_SALT_CHARS} printable characters", "cache_salt"
        )
    return salt


def _seed(sampling: SamplingParams, limits: Limits, number: int) -> int:
    if sampling.seed is not None:
        return sampling.seed
    state = np.random.SeedSequence([limits.seed, number]).generate_state(2)
    return int(state[0]) << 32 | int(state[1])


def bad_words_token_ids(
    words: Listing[str], encode: Encode | None, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences to exclude for `bad_words`, without repetitions.

    Each word has one or two sequences: its tokens at the beginning of a text and after a space.

    Args:
        encode: tokenizes a word, or None without a tokenizer.

    Raises:
        InvalidRequest: there is no tokenizer, a token is not in the vocabulary, or there are too
            many or too long sequences.
    """
    name = "bad_words"
    if not words:
        return ()
    if encode is None:
        raise InvalidRequest(f"this engine has no tokenizer, which {name} need", name)
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        plain = tuple(encode(word.lstrip()))
        spaced = tuple(encode(f" {word.lstrip()}"))
        # If the space is a separate token, excluding the tokens of the word is enough.
        several = (plain,) if spaced[-len(plain) :] == plain else (plain, spaced)
        for ids in several:
            if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(
                    f"{name}: {word!r} is {len(ids)} tokens; each may be 1 to "
                    f"{MAX_BAD_WORD_TOKENS}",
                    name,
                )
            if max(ids) >= vocab_size:
                raise InvalidRequest(
                    f"{name}: {word!r} holds token id {max(ids)}, and the model's are 0 to "
                    f"{vocab_size - 1}",
                    name,
                )
            sequences[ids] = None
    several = sum(len(ids) > 1 for ids in sequences)
    if several > MAX_BAD_WORDS_TOKENIZED:
        raise InvalidRequest(
            f"{name} make {several} sequences of several tokens; at most "
            f"{MAX_BAD_WORDS_TOKENIZED} are allowed (a word may make two)",
            name,
        )
    return tuple(sequences)


def _check_tokens_are_left(
    sampling: SamplingParams,
    bad_words: tuple[tuple[int, ...], ...],
    stop_token_ids: tuple[int, ...],
    vocab_size: int,
) -> None:
    """Raise InvalidRequest if a request's settings exclude every token at the first position.

    The tokens of logit_bias and allowed_token_ids must also be in the vocabulary.
    """
    for token in sampling.logit_bias or ():
        exact_int(token, "logit_bias: a token id", 0, vocab_size - 1, "logit_bias")
    allowed = sampling.allowed_token_ids
    if allowed is not None:
        exact_int(max(allowed), "allowed_token_ids", 0, vocab_size - 1)
    excluded = {word[0] for word in bad_words if len(word) == 1}
    if sampling.min_tokens > 0:
        excluded.update(stop_token_ids)
    remaining = vocab_size - len(excluded) if allowed is None else len(set(allowed) - excluded)
    if remaining <= 0:
        name = "bad_words" if allowed is None else "allowed_token_ids"
        raise InvalidRequest(
            f"{name} leave no token to draw"
            + (" (min_tokens excludes those that end it)" if sampling.min_tokens else ""),
            name,
        )


def _stop_token_ids(sampling: SamplingParams, limits: Limits) -> tuple[int, ...]:
    requested: Listing[int] = sampling.stop_token_ids or ()
    for token in requested:
        exact_int(token, "stop_token_ids", 0, limits.vocab_size - 1)
    ends = () if sampling.ignore_eos else limits.eos_token_ids
    together = tuple(dict.fromkeys((*ends, *requested)))

    if len(together) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids and the model's own ends together are at most {MAX_STOP_TOKEN_IDS}",
            "stop_token_ids",
        )
    return together
