"""From a request's fields to SamplingParams; what the engine cannot do yet is refused here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.request import SamplingParams
from jaxserve.server.protocol import Sampling

# Fields that are known and not served yet, each with the values that ask for nothing and pass.
# A field leaves this table when the engine can do it.
NOT_YET: dict[str, tuple[Any, ...]] = {
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "logprob_token_ids": (None, []),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "prompt_embeds": (None,),
    "lora_path": (None,),
    "thinking_token_budget": (None,),
    "spaces_between_special_tokens": (None, True),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "chat_template": (None,),
    "documents": (None, []),
    "suffix": (None, ""),
    "mm_processor_kwargs": (None, {}),
    "kv_transfer_params": (None,),
    "truncation_side": (None, "left"),
}
# Read by their name from a request; the rest of SamplingParams is settled elsewhere.
_SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids"),
    *("min_tokens", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output"),
)


def refuse_unserved(fields: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse what would have to be ignored silently.

    Raises:
        InvalidRequest: naming a field of the table that asks for something.
    """
    for name in sorted(fields.keys() & table.keys()):
        value, neutral = fields[name], table[name]
        if not any(type(value) is type(one) and value == one for one in neutral):
            raise InvalidRequest(f"{name} is not supported by this server", name)


def sampling_params(
    request: Sampling, defaults: SamplingParams, max_tokens: int | None
) -> SamplingParams:
    """A request's settings over the checkpoint's.

    Raises:
        InvalidRequest: naming the field.
    """
    given = {name: getattr(request, name) for name in _SAMPLING}
    given = {name: value for name, value in given.items() if value is not None}
    return replace(defaults, max_tokens=max_tokens, **given)


def check_stream_options(request: Sampling) -> None:
    """Raises InvalidRequest for stream_options without stream."""
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream=true", "stream_options")
