"""Prompts and conversations as callers of `LLM` and `AsyncLLM` pass them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listing
from contextlib import suppress
from typing import Any, NamedTuple

from jaxserve.errors import InvalidRequest
from jaxserve.settings.checks import check_content_format, exact_int, is_listing, is_neutral
from jaxserve.settings.compat import endpoint_fields, refuse_unsupported
from jaxserve.text.content_format import WordsLost
from jaxserve.text.messages import COMMON_INPUTS, RENDERING_ARGUMENTS
from jaxserve.text.named_templates import find_template
from jaxserve.text.template_budget import TemplateTooLong
from jaxserve.text.tokenizer import Tokenizer

CONTENT_FORMAT = "chat_template_content_format"
Prompt = str | Listing[int] | Mapping[str, Any]


class PromptParts(NamedTuple):
    """A prompt as a caller passed it.

    Attributes:
        text: of the prompt, if it has one.
        body: the text or the token ids to serve.
        cache_salt: cached pages are shared only with prompts of the same salt.
    """

    text: str | None
    body: Any
    cache_salt: str | None = None


def prompt_parts(prompt: Any) -> PromptParts:
    """Split a prompt into its parts.

    Accepts text, token ids, and vLLM's dicts {"prompt": text} and {"prompt_token_ids": ids}, which
    may hold a "cache_salt".

    Raises:
        InvalidRequest: a dict with neither of the first two keys, or with one that is unsupported.
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
    """Return a tokenizer with the chat template, and the form of content, that a call names.

    Args:
        template: a template, a file, or the name of a shipped one; None for the model's.
        options: may hold chat_template_content_format.

    Raises:
        InvalidRequest: there is no such template or form.
    """
    form = options.get(CONTENT_FORMAT, "auto")
    check_content_format(form)
    if form != "auto":
        tokenizer = tokenizer.with_content_format(form)
    if template is None:
        return tokenizer
    found = find_template(template)
    with suppress(WordsLost, TemplateTooLong):  # it may show other inputs, and may be stopped later
        tokenizer.fit(found)
    return tokenizer.with_template(found)


def template_inputs(tokenizer: Tokenizer, options: Mapping[str, Any], free: Any) -> dict[str, Any]:
    """Return the inputs of the chat template.

    Args:
        options: passed as arguments; the template must read those that not every template reads.
        free: passed as `chat_template_kwargs`, which the template may leave unread.

    Raises:
        InvalidRequest: naming an input that would have been ignored.
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
    """Return a list of prompts, from one or several.

    Raises:
        InvalidRequest: none, or what is no prompt.
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
    """Return one value for each prompt, from one for all or a list of them.

    Raises:
        InvalidRequest: the list has another length.
    """
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts", name)
    return list(value)


def truncated(
    prompt: list[int], keep: int | None, max_model_len: int, side: str | None = None
) -> list[int]:
    """Return the last `keep` tokens of a prompt, or the first; -1 leaves room for one more.

    Args:
        side: what is cut off: "left", which is the default, or "right".

    Raises:
        InvalidRequest: `keep` is out of range, or there is no such side.
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
    """Return a prompt's token ids; what is no text stays as it is.

    Raises:
        InvalidRequest: the engine has no tokenizer.
    """
    if not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise InvalidRequest("this engine has no tokenizer; pass token ids", "prompt")
    return tokenizer.encode(prompt, add_special_tokens)


def tokenized(
    prompt: Any, options: Mapping[str, Any] | None, tokenizer: Tokenizer | None, longest: int
) -> Any:
    """Return a prompt as vLLM's `tokenization_kwargs` want it: as it is where there are none.

    Args:
        options: add_special_tokens, truncate_prompt_tokens and truncation_side.
        longest: the engine's max_model_len.

    Raises:
        InvalidRequest: naming an option that is unknown or out of range.
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
        return prompt  # which is refused where requests are made
    keep, side = options.get("truncate_prompt_tokens"), options.get("truncation_side")
    return truncated(prompt, keep, longest, side)
