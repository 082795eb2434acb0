"""Parsing of prompts and chat arguments of `LLM` and `AsyncLLM`."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listing
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from jaxserve.errors import InvalidRequest
from jaxserve.settings.checks import check_content_format, exact_int, is_listing, is_neutral
from jaxserve.settings.compat import endpoint_fields, refuse_unsupported
from jaxserve.text.messages import COMMON_INPUTS, RENDERING_ARGUMENTS, WordsLost
from jaxserve.text.template import find_template
from jaxserve.text.template_budget import TemplateTooLong
from jaxserve.text.tokenizer import Tokenizer

CONTENT_FORMAT = "chat_template_content_format"
Prompt = str | Listing[int] | Mapping[str, Any]


class PromptParts(NamedTuple):
    """The parts of a caller's prompt: its text or None, text or token ids, and cache salt."""

    text: str | None  # the text of the prompt, or None
    body: Any  # the text or the token ids to serve
    # The cache salt, or None. Cached pages are shared between prompts of equal salts.
    cache_salt: str | None = None


def prompt_parts(prompt: Any) -> PromptParts:
    """Split a prompt of `LLM` or `AsyncLLM` into its text, its content and its cache salt.

    The text is None if the caller passed only token ids. The salt is None unless a dict has one.

    Args:
        prompt: text, token ids, or one of vLLM's dicts {"prompt": text} and {"prompt_token_ids":
            ids}, which can have a "cache_salt". Token ids take precedence over text.

    Raises:
        InvalidRequest: a dict has neither of the two keys, or an unsupported one.
    """
    if not isinstance(prompt, Mapping):
        return PromptParts(prompt if isinstance(prompt, str) else None, prompt)
    for name, value in prompt.items():
        if name in ("prompt", "prompt_token_ids", "cache_salt"):
            continue
        if not is_neutral(value, endpoint_fields("prompts").get(name, ())):
            raise InvalidRequest(f"a prompt dict may not hold {str(name)[:60]!r}", "prompt")
    text, salt = prompt.get("prompt"), prompt.get("cache_salt")
    if prompt.get("prompt_token_ids") is not None:
        return PromptParts(text, prompt["prompt_token_ids"], salt)
    if "prompt" not in prompt:
        raise InvalidRequest("a prompt dict needs 'prompt' or 'prompt_token_ids'", "prompt")
    return PromptParts(text if isinstance(text, str) else None, text, salt)


def chat_tokenizer(tokenizer: Tokenizer, template: Any, options: Mapping[str, Any]) -> Tokenizer:
    """Return a tokenizer that uses the chat template and content format of one call of `LLM.chat`.

    Args:
        template: a template, a file, or the name of a shipped template. None for the model's.
        options: the options of the call, of which chat_template_content_format is read.

    Raises:
        InvalidRequest: the template or the content format does not exist.
    """
    form = options.get(CONTENT_FORMAT, "auto")
    check_content_format(form)
    if form != "auto":
        tokenizer = tokenizer.with_content_format(form)
    if template is None:
        return tokenizer
    source = find_template(template)
    with suppress(WordsLost, TemplateTooLong):  # it may render other inputs, or be stopped later
        tokenizer.fit(source)
    return tokenizer.with_template(source)


def template_inputs(tokenizer: Tokenizer, options: Mapping[str, Any], free: Any) -> dict[str, Any]:
    """Validate the chat template's inputs of one call of `LLM.chat`, and return them by name.

    Args:
        options: inputs passed as keyword arguments. The template must read them, except common
            inputs such as tools.
        free: inputs passed as `chat_template_kwargs`, which the template can ignore. They take
            precedence. None for no inputs.

    Raises:
        InvalidRequest: the template does not read an option, or an input is not allowed.
    """
    name = "chat_template_kwargs"
    if free is not None and not isinstance(free, Mapping):
        raise InvalidRequest(f"{name} must be a dict, got {type(free).__name__}", name)
    unsupported = endpoint_fields("prompts") if options else {}
    refuse_unsupported(options, unsupported)
    inputs = {}
    for option, value in options.items():
        if option in unsupported or option == CONTENT_FORMAT:
            continue
        if option in RENDERING_ARGUMENTS:
            raise InvalidRequest(f"{option} is not supported", option)
        is_common = option in COMMON_INPUTS and not (option == "documents" and value)
        if not is_common and not tokenizer.template_reads(option):
            raise InvalidRequest(f"the chat template knows no {option[:60]!r}", option)
        inputs[option] = value
    for option in free or ():
        if not isinstance(option, str) or option in RENDERING_ARGUMENTS:
            raise InvalidRequest(f"{name} may not hold {str(option)[:60]!r}", name)
    return inputs | dict(free or {})


def as_list(prompts: Any) -> list[Any]:
    """Return a list of prompts, given one prompt or a list of prompts.

    A list of integers is one prompt of token ids.

    Raises:
        InvalidRequest: the list is empty, or the value is not a prompt.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not is_listing(prompts):
        kind = type(prompts).__name__
        raise InvalidRequest(f"prompts must be a prompt or a list of prompts, got {kind}", "prompt")
    many = list(prompts)
    if not many:
        raise InvalidRequest("prompts is empty", "prompt")
    first = many[0]
    if isinstance(first, str | Mapping) or hasattr(first, "__len__"):
        return many
    return [prompts]


def one_each(value: Any, count: int, name: str) -> list[Any]:
    """Return a list with one value for each of `count` prompts.

    A list or tuple is copied, and any other value is repeated.

    Args:
        name: name of the argument in the error message.

    Raises:
        InvalidRequest: the list has another length than `count`.
    """
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts", name)
    return list(value)


def truncated(
    prompt: list[int], keep: int | None, max_model_len: int, side: str | None = None
) -> list[int]:
    """Return the last `keep` token ids of a prompt, or the first ones if `side` is "right".

    Args:
        keep: number of token ids to keep, None for all, or -1 for max_model_len - 1.
        side: the side that is cut off: "left" (default) or "right".

    Raises:
        InvalidRequest: `keep` is out of range, or `side` is unknown.
    """
    if side not in (None, "left", "right"):
        raise InvalidRequest(
            f"truncation_side must be left or right, got {side!r:.60}", "truncation_side"
        )
    if keep is None:
        return prompt
    keep = exact_int(keep, "truncate_prompt_tokens", -1, max_model_len - 1)
    if keep == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens must be -1 or at least 1", "truncate_prompt_tokens"
        )
    keep = max_model_len - 1 if keep == -1 else keep
    return prompt[:keep] if side == "right" else prompt[-keep:]


def encoded(prompt: Any, tokenizer: Tokenizer | None, add_special_tokens: bool = True) -> Any:
    """Return the token ids of a text prompt. Any other prompt is returned unchanged.

    Args:
        add_special_tokens: whether the tokenizer adds tokens such as beginning-of-sequence.

    Raises:
        InvalidRequest: the prompt is text and the engine has no tokenizer.
    """
    if not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise InvalidRequest("this engine has no tokenizer; pass token ids", "prompt")
    return tokenizer.encode(prompt, add_special_tokens)


def tokenized(
    prompt: Any, options: Mapping[str, Any] | None, tokenizer: Tokenizer | None, longest: int
) -> Any:
    """Return a prompt's token ids, tokenized and truncated by vLLM's `tokenization_kwargs`.

    Args:
        prompt: text or token ids. It is returned unchanged if there are no options.
        options: add_special_tokens, truncate_prompt_tokens and truncation_side, or None.
        longest: the engine's context length.

    Raises:
        InvalidRequest: an option is unknown or out of range. The message names it.
    """
    if not options:
        return prompt
    name = "tokenization_kwargs"
    if not isinstance(options, Mapping):
        raise InvalidRequest(f"{name} must be a dict, got {type(options).__name__}", name)
    unknown = options.keys() - {"add_special_tokens", "truncate_prompt_tokens", "truncation_side"}
    if unknown:
        raise InvalidRequest(f"{name} may not hold {str(min(unknown, key=str))[:60]!r}", name)
    prompt = encoded(prompt, tokenizer, options.get("add_special_tokens") is not False)
    if not is_listing(prompt):
        return prompt  # RequestFactory refuses it

    keep, side = options.get("truncate_prompt_tokens"), options.get("truncation_side")
    return truncated(prompt, keep, longest, side)


def check_token_ids(token_ids: Any, vocab_size: int) -> np.ndarray:
    """Validate a prompt of token ids, and return it as int32[n].

    Args:
        token_ids: a list or array of one or more integers in [0, vocab_size).

    Raises:
        InvalidRequest: the prompt has another form, or an id outside this range, whose first
            position is in the message.
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
