"""From what a caller says to a Request that is certain to be served: the one validator."""

from __future__ import annotations

import time
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.errors import InvalidRequest, PromptTooLong
from jaxserve.request import (
    MAX_CACHE_SALT_CHARS,
    MAX_STOP_TOKEN_IDS,
    Request,
    SamplingParams,
    exact_int,
)


@dataclass(frozen=True)
class Limits:
    """What the model and its cache can take.

    Attributes:
        vocab_size: width of the logits; token ids are below it.
        max_model_len: most tokens of a sequence, no more than the cache holds.
        eos_token_ids: the model's own ends.
        seed: the engine's, from which requests without a seed get theirs.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    seed: int


def check_token_ids(token_ids: Any, vocab_size: int) -> np.ndarray:
    """A prompt of token ids as int32[n], each an exact integer in [0, vocab_size).

    Raises:
        InvalidRequest: naming the first bad position.
    """
    if isinstance(token_ids, str | bytes) or not hasattr(token_ids, "__len__"):
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
) -> Request:
    """Check everything about a request and settle what it left open.

    Args:
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
    salt = "" if cache_salt is None else cache_salt
    if not isinstance(salt, str) or len(salt) > MAX_CACHE_SALT_CHARS or not salt.isprintable():
        raise InvalidRequest(
            f"cache_salt must be at most {MAX_CACHE_SALT_CHARS} printable characters", "cache_salt"
        )
    room = limits.max_model_len - len(ids)
    wanted = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    if sampling.min_tokens > wanted:
        raise InvalidRequest(
            f"min_tokens must be at most the {wanted} tokens that there is room for, "
            f"got {sampling.min_tokens}",
            "min_tokens",
        )
    seed = sampling.seed
    if seed is None:
        state = np.random.SeedSequence([limits.seed, number]).generate_state(2)
        seed = int(state[0]) << 32 | int(state[1])
    return Request(
        request_id=request_id,
        prompt_token_ids=ids,
        sampling=sampling,
        seed=seed,
        stop_token_ids=_stop_token_ids(sampling, limits),
        max_length=len(ids) + wanted,
        priority=exact_int(priority, "priority", -(2**31), 2**31 - 1),
        arrival_time=time.monotonic(),
        cache_salt=salt,
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
