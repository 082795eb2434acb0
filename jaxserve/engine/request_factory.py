"""From what a caller says to a Request that is certain to be served: the one validator."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxserve.config import MAX_SCHEDULER_STEPS
from jaxserve.engine.text.thinking import ThinkingConstraint, ThinkingMarks
from jaxserve.errors import InvalidRequest, PromptTooLong
from jaxserve.request import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS_TOKENIZED,
    MAX_CACHE_SALT_CHARS,
    MAX_STOP_TOKEN_IDS,
    Request,
    SamplingParams,
    exact_int,
    is_listing,
)
from jaxserve.structured import NAME as STRUCTURED
from jaxserve.structured import StructuredOutputsParams

Encode = Callable[[str], list[int]]
Constrain = Callable[[StructuredOutputsParams], Any]


@dataclass(frozen=True)
class Limits:
    """What the model and its cache can take.

    Attributes:
        vocab_size: width of the logits; token ids are below it.
        max_model_len: most tokens of a sequence, no more than the cache holds.
        eos_token_ids: the model's own ends.
        seed: the engine's, from which requests without a seed get theirs.
        launch_steps: most decode steps of one launch; unless it is known, the most that a
            configuration may ask for.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    seed: int
    launch_steps: int = MAX_SCHEDULER_STEPS


def check_token_ids(token_ids: Any, vocab_size: int) -> np.ndarray:
    """A prompt of token ids as int32[n], each an exact integer in [0, vocab_size).

    Raises:
        InvalidRequest: naming the first bad position.
    """
    if not is_listing(token_ids):
        kind = type(token_ids).__name__
        raise InvalidRequest(f"prompt must be text or a list of token ids, got {kind}", "prompt")
    if len(token_ids) == 0:
        raise InvalidRequest("prompt is empty; it needs at least one token", "prompt")
    if isinstance(token_ids, list | tuple):
        kinds = set(map(type, token_ids))
        if kinds != {int} and not all(issubclass(kind, np.integer | int) for kind in kinds):
            kinds_named = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise InvalidRequest(f"prompt token ids must be integers, got {kinds_named}", "prompt")
        if bool in kinds:
            raise InvalidRequest("prompt token ids must be integers, got bool", "prompt")
    try:
        ids = np.asarray(token_ids)
    except (ValueError, OverflowError):
        raise InvalidRequest("prompt must be one flat list of token ids", "prompt") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRequest(
            f"prompt must be one flat list of token ids from 0 to {vocab_size - 1}", "prompt"
        )
    bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(bad):
        raise InvalidRequest(
            f"prompt token id {ids[bad[0]]} at position {bad[0]} is outside 0 to {vocab_size - 1}",
            "prompt",
        )
    return ids.astype(np.int32)


def make_request(
    request_id: str,
    prompt_token_ids: Any,
    sampling: SamplingParams,
    limits: Limits,
    *,
    number: int,
    priority: int = 0,
    cache_salt: str | None = None,
    thinking: ThinkingMarks | None = None,
    encode: Encode | None = None,
    constrain: Constrain | None = None,
) -> Request:
    """Check everything about a request and settle what it left open.

    Args:
        encode: text to token ids; bad_words need it.
        constrain: compiles structured_outputs.
        thinking: where the answer's thoughts begin and end; structured_outputs hold after them.
        number: the request's place in the order of arrival; its seed follows from it and the
            engine's, where it brings none.

    Raises:
        InvalidRequest: naming the field, what is wrong and what is allowed.
    """
    if not isinstance(sampling, SamplingParams):
        kind = type(sampling).__name__
        raise InvalidRequest(f"sampling_params must be SamplingParams, got {kind}")
    ids = check_token_ids(prompt_token_ids, limits.vocab_size)
    longest = limits.max_model_len - 1
    if len(ids) > longest:
        raise PromptTooLong(
            f"prompt has {len(ids)} tokens; at most {longest} leave room for an answer within "
            f"max_model_len ({limits.max_model_len})",
            "prompt",
        )
    room = limits.max_model_len - len(ids)
    wanted = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    if sampling.min_tokens > wanted:
        sampling = replace(sampling, min_tokens=wanted)
    stop_token_ids = _stop_token_ids(sampling, limits)
    bad_words = bad_words_token_ids(sampling.bad_words or (), encode, limits.vocab_size)
    _check_something_is_left(sampling, bad_words, stop_token_ids, limits.vocab_size)
    return Request(
        request_id=request_id,
        prompt_token_ids=ids,
        sampling=sampling,
        seed=_seed(sampling, limits, number),
        stop_token_ids=stop_token_ids,
        max_length=len(ids) + wanted,
        priority=exact_int(priority, "priority", -(2**31), 2**31 - 1),
        arrival_time=time.monotonic(),
        cache_salt=_checked_salt(cache_salt),
        bad_words_token_ids=bad_words,
        constraint=_constraint(sampling, constrain, thinking, limits),
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


def _constraint(
    sampling: SamplingParams,
    constrain: Constrain | None,
    thinking: ThinkingMarks | None,
    limits: Limits,
) -> Any:
    form, budget = sampling.structured_outputs, sampling.thinking_token_budget
    if form is not None and constrain is None:
        raise InvalidRequest(f"this engine has no tokenizer, which {STRUCTURED} needs", STRUCTURED)
    if budget is not None and thinking is None:
        raise InvalidRequest(
            "thinking_token_budget needs a model whose reasoning is known (reasoning_parser)",
            "thinking_token_budget",
        )
    inner = None if form is None or constrain is None else constrain(form)
    if thinking is None or thinking.is_closed or (inner is None and budget is None):
        return inner
    # One launch is in flight while the next is scheduled.
    ahead = 2 * limits.launch_steps
    ends = limits.eos_token_ids
    return ThinkingConstraint(thinking, budget, inner, limits.vocab_size, ends, ahead)


def bad_words_token_ids(
    words: Listing[str], encode: Encode | None, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Each word in tokens, as it is written at the start of a text and after a space.

    Raises:
        InvalidRequest: there is no tokenizer, or it makes too many or too long sequences.
    """
    name = "bad_words"
    if not words:
        return ()
    if encode is None:
        raise InvalidRequest(f"this engine has no tokenizer, which {name} need", name)
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain = tuple(encode(word.lstrip()))
        spaced = tuple(encode(f" {word.lstrip()}"))
        # Where the space is a token before the word's own, those exclude it already.
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
            found[ids] = None
    several = sum(len(ids) > 1 for ids in found)
    if several > MAX_BAD_WORDS_TOKENIZED:
        raise InvalidRequest(
            f"{name} make {several} sequences of several tokens; at most "
            f"{MAX_BAD_WORDS_TOKENIZED} are allowed (a word may make two)",
            name,
        )
    return tuple(found)


def _check_something_is_left(
    sampling: SamplingParams,
    bad_words: tuple[tuple[int, ...], ...],
    stop_token_ids: tuple[int, ...],
    vocab_size: int,
) -> None:
    """Ids within the logits, and among them at least one that may be drawn as the first token."""
    for token in sampling.logit_bias or ():
        exact_int(token, "logit_bias: a token id", 0, vocab_size - 1, "logit_bias")
    allowed = sampling.allowed_token_ids
    if allowed is not None:
        exact_int(max(allowed), "allowed_token_ids", 0, vocab_size - 1)
    excluded = {word[0] for word in bad_words if len(word) == 1}
    if sampling.min_tokens > 0:
        excluded.update(stop_token_ids)
    left = vocab_size - len(excluded) if allowed is None else len(set(allowed) - excluded)
    if left <= 0:
        name = "bad_words" if allowed is None else "allowed_token_ids"
        raise InvalidRequest(
            f"{name} leave no token to draw"
            + (" (min_tokens excludes those that end it)" if sampling.min_tokens else ""),
            name,
        )


def _stop_token_ids(sampling: SamplingParams, limits: Limits) -> tuple[int, ...]:
    asked: Listing[int] = sampling.stop_token_ids or ()
    for token in asked:
        exact_int(token, "stop_token_ids", 0, limits.vocab_size - 1)
    own = () if sampling.ignore_eos else limits.eos_token_ids
    together = tuple(dict.fromkeys((*own, *asked)))
    if len(together) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids and the model's own ends together are at most {MAX_STOP_TOKEN_IDS}",
            "stop_token_ids",
        )
    return together
