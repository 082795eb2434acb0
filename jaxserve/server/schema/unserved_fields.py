"""Fields of requests that only other servers' APIs have, each with a replacement.

The fields are OpenAI's, Anthropic's, vLLM's, llama.cpp's and Ollama's, and fields of other servers
for the choice of tokens. A row holds where an endpoint has no field of that name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from jaxserve.errors import InvalidRequest


class UnservedField(NamedTuple):
    """A field that is not served.

    Attributes:
        neutral: values that change no answer, and pass; None where every value does.
        instead: the replacement for any other value.
        below: numbers below this one pass too.
        above: numbers above this one pass too.
        needs: served fields with their neutral values. While each of them is absent or neutral,
            every value passes.
    """

    neutral: tuple[Any, ...] | None
    instead: str
    below: float = -math.inf
    above: float = math.inf
    needs: tuple[tuple[str, Any], ...] = ()

    def passes(self, value: Any, fields: Mapping[str, Any]) -> bool:
        """Return whether a value is neutral beside the other fields of its request."""
        if value is None or self.neutral is None:
            return True
        if any(_is_same(value, neutral) for neutral in self.neutral):
            return True
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and (value < self.below or value > self.above):
            return True
        sent = [(fields.get(name), neutral) for name, neutral in self.needs]
        return bool(sent) and all(x is None or _is_same(x, neutral) for x, neutral in sent)


def _is_same(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and value == other


_SAMPLER = (
    "temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty and frequency_penalty "
    "choose tokens here; leave it out"
)
_TEXT_ONLY = "only text is served; leave it out"
_LORA = "adapters are not served; merge them into the checkpoint"
_ONE_PROCESS = "one process serves a model, without transfers to others; leave it out"
_NO_EFFECT = "it changes no answer"
_WINDOW = "penalties count all tokens of the prompt and the answer; leave it out"
_LENGTH = "max_tokens is its name here"
_BEAMS = (
    "beam search is LLM.beam_search of the Python API, and n samples several answers; leave it out"
)
_REPETITION = "repetition_penalty is its name here"
_CHOICES = "n is its name here"
_BANNED = "bad_words excludes texts, and logit_bias single tokens"
_NO_CACHE = "a cache_salt of its own keeps a request from cached pages"
_FORM = "response_format and structured_outputs set the form of an answer"
_THOUGHTS = "enable_thinking and reasoning_effort set how the model thinks"
_OPTIONS = "send its entries as fields of the request: temperature, top_p, max_tokens and so on"
_SYSTEM = "send a message of role system"
_TEMPLATE = "chat_template and chat_template_kwargs are the fields of a template here"
_PENALTIES = (("repetition_penalty", 1), ("presence_penalty", 0), ("frequency_penalty", 0))
# llama.cpp's orders of samplers, which hold where a request names none.
_SAMPLERS = ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
_MORE_SAMPLERS = ["dry", "top_n_sigma", *_SAMPLERS[1:]]
_ORDERS = (_SAMPLERS, ["penalties", *_SAMPLERS], _MORE_SAMPLERS, ["penalties", *_MORE_SAMPLERS])

# Fields of a sampler that another field of the table turns on: that one is refused in their place.
_DEPENDENT = UnservedField(None, _NO_EFFECT)

FIELDS: dict[str, UnservedField] = {
    # OpenAI's.
    "moderation": UnservedField((), "texts are not moderated; leave it out"),
    "modalities": UnservedField((["text"],), _TEXT_ONLY),
    "audio": UnservedField((), _TEXT_ONLY),
    "prediction": UnservedField((), "no draft of the answer is used; leave it out"),
    "web_search_options": UnservedField((), "the server runs no tools; leave it out"),
    "store": UnservedField(None, _NO_EFFECT),
    "metadata": UnservedField(None, _NO_EFFECT),
    "service_tier": UnservedField(None, _NO_EFFECT),
    "verbosity": UnservedField(None, _NO_EFFECT),
    "safety_identifier": UnservedField(None, _NO_EFFECT),
    "prompt_cache_key": UnservedField(None, _NO_EFFECT),
    "prompt_cache_options": UnservedField(None, _NO_EFFECT),
    "prompt_cache_retention": UnservedField(None, _NO_EFFECT),
    # Anthropic's.
    "cache_control": UnservedField(None, _NO_EFFECT),
    # vLLM's.
    "skip_reading_prefix_cache": UnservedField((False,), _NO_CACHE),
    "prompt_embeds": UnservedField((), "prompts are text or token ids"),
    "lora_path": UnservedField((), _LORA),
    "mm_processor_kwargs": UnservedField(({},), _TEXT_ONLY),
    "media_io_kwargs": UnservedField(({},), _TEXT_ONLY),
    "kv_transfer_params": UnservedField((), _ONE_PROCESS),
    "ec_transfer_params": UnservedField((), _ONE_PROCESS),
    "watermarking": UnservedField((False,), "texts get no watermark; leave it out"),
    "vllm_xargs": UnservedField(({},), "the engine runs no plugins; leave it out"),
    "extra_args": UnservedField(({},), "the engine runs no plugins; leave it out"),
    "logits_processors": UnservedField(([],), "logit_bias and bad_words change logits here"),
    "repetition_detection": UnservedField((), "stop and repetition_penalty bound repetitions"),
    "return_weight_versions": UnservedField((False,), "weights have no versions; leave it out"),
    "routed_experts_prompt_start": UnservedField((0,), "routes of experts are not returned"),
    "stream_interval": UnservedField((1,), "each token is sent as it comes; leave it out"),
    "use_beam_search": UnservedField((False,), _BEAMS),
    "length_penalty": UnservedField((1,), _BEAMS),
    "early_stopping": UnservedField((False,), _BEAMS),
    # llama.cpp's.
    "repeat_penalty": UnservedField((1,), _REPETITION),
    "repeat_last_n": UnservedField((-1,), _WINDOW, needs=_PENALTIES),
    "penalize_nl": UnservedField((True,), _WINDOW, needs=_PENALTIES),
    "dry_multiplier": UnservedField((0,), _SAMPLER),
    "dry_base": _DEPENDENT,
    "dry_allowed_length": _DEPENDENT,
    "dry_penalty_last_n": _DEPENDENT,
    "dry_sequence_breakers": _DEPENDENT,
    "xtc_probability": UnservedField((0,), _SAMPLER),
    "xtc_threshold": _DEPENDENT,
    "top_n_sigma": UnservedField((0,), _SAMPLER, below=0),
    "typical_p": UnservedField((1,), _SAMPLER, above=1),
    "tfs_z": UnservedField((1,), _SAMPLER, above=1),
    "dynatemp_range": UnservedField((0,), _SAMPLER),
    "dynatemp_exponent": _DEPENDENT,
    "mirostat": UnservedField((0,), _SAMPLER),
    "mirostat_tau": _DEPENDENT,
    "mirostat_eta": _DEPENDENT,
    "adaptive_target": UnservedField((), _SAMPLER, below=0),
    "adaptive_decay": _DEPENDENT,
    "samplers": UnservedField(
        ([], "", *_ORDERS, "dkypmxt", "edkypmxt", "edskypmxt"),
        "the order is fixed: penalties, temperature, min_p, top_k, top_p; leave it out",
    ),
    "min_keep": UnservedField((0, 1), _SAMPLER, below=0),
    "n_probs": UnservedField((0,), "logprobs is its name here", below=0),
    "post_sampling_probs": _DEPENDENT,
    "grammar": UnservedField(("",), 'send structured_outputs: {"grammar": ...}'),
    "lora": UnservedField(([],), _LORA),
    "n_cmpl": UnservedField((1,), _CHOICES),
    "n_indent": UnservedField((0,), "structured_outputs sets the form of an answer"),
    "t_max_predict_ms": UnservedField((0,), "max_tokens bounds an answer", below=0),
    "t_max_prompt_ms": UnservedField((0,), "max_tokens bounds an answer", below=0),
    "return_tokens": UnservedField((False,), "return_token_ids is its name here"),
    "cache_prompt": UnservedField((True,), _NO_CACHE),
    "reasoning_format": UnservedField(
        ("auto", "deepseek"), "--reasoning-parser sets it for all requests"
    ),
    "reasoning_control": UnservedField((False,), "thinking_token_budget bounds thoughts"),
    "reasoning_budget_tokens": UnservedField((-1,), "thinking_token_budget is its name here"),
    "thinking_budget_tokens": UnservedField((-1,), "thinking_token_budget is its name here"),
    "reasoning_budget_message": UnservedField(("",), "the marks of the template end thoughts"),
    "parse_tool_calls": UnservedField((True,), 'tool_choice: "none" leaves calls unread'),
    "image_data": UnservedField(([],), _TEXT_ONLY),
    "multimodal_data": UnservedField(([],), _TEXT_ONLY),
    "n_keep": UnservedField(None, _NO_EFFECT),  # a request that outgrows the context ends there
    "n_discard": UnservedField(None, _NO_EFFECT),
    "n_cache_reuse": UnservedField(None, _NO_EFFECT),
    "id_slot": UnservedField(None, _NO_EFFECT),
    "slot_id": UnservedField(None, _NO_EFFECT),
    "backend_sampling": UnservedField(None, _NO_EFFECT),
    # Ollama's.
    "format": UnservedField(("",), _FORM),
    "options": UnservedField(({},), _OPTIONS),
    "think": UnservedField((), _THOUGHTS),
    "system": UnservedField(("",), _SYSTEM),
    "template": UnservedField(("",), _TEMPLATE),
    "images": UnservedField(([],), _TEXT_ONLY),
    "context": UnservedField(([],), "send the earlier messages in messages"),
    "num_predict": UnservedField((), _LENGTH),
    # Settings of Transformers, SGLang, text-generation-webui, Aphrodite and KoboldCpp.
    "max_new_tokens": UnservedField((), _LENGTH),
    "min_new_tokens": UnservedField((0,), "min_tokens is its name here"),
    "max_length": UnservedField((), _LENGTH),
    "ban_eos_token": UnservedField((False,), "ignore_eos is its name here"),
    "add_bos_token": UnservedField((True,), "add_special_tokens is its name here"),
    "do_sample": UnservedField((True,), "temperature: 0 takes the most likely token"),
    "num_beams": UnservedField((1,), _BEAMS),
    "num_return_sequences": UnservedField((1,), _CHOICES),
    "no_repeat_ngram_size": UnservedField((0,), _SAMPLER),
    "encoder_repetition_penalty": UnservedField((1,), _SAMPLER),
    "repetition_penalty_range": UnservedField((-1, 0), _WINDOW, needs=_PENALTIES),
    "rep_pen": UnservedField((1,), _REPETITION),
    "rep_pen_range": UnservedField((-1, 0), _WINDOW, needs=_PENALTIES),
    "dry_range": _DEPENDENT,
    "top_a": UnservedField((0,), _SAMPLER),
    "tfs": UnservedField((1,), _SAMPLER, above=1),
    "typical": UnservedField((1,), _SAMPLER, above=1),
    "nsigma": UnservedField((0,), _SAMPLER, below=0),
    "epsilon_cutoff": UnservedField((0,), _SAMPLER),
    "eta_cutoff": UnservedField((0,), _SAMPLER),
    "smoothing_factor": UnservedField((0,), _SAMPLER),
    "smoothing_curve": _DEPENDENT,
    "skew": UnservedField((0,), _SAMPLER),
    "dynamic_temperature": UnservedField((False,), _SAMPLER),
    "temperature_last": UnservedField(
        (False,), "temperature comes first: penalties, temperature, min_p, top_k, top_p"
    ),
    "mirostat_mode": UnservedField((0,), _SAMPLER),
    "guidance_scale": UnservedField((1,), "no second prompt guides tokens; leave it out"),
    "negative_prompt": UnservedField(("",), "no second prompt guides tokens; leave it out"),
    "penalty_alpha": UnservedField((0,), _SAMPLER),
    "sampler_priority": UnservedField(([],), "the order of samplers is fixed; leave it out"),
    "banned_tokens": UnservedField(([], ""), _BANNED),
    "banned_strings": UnservedField(([], ""), _BANNED),
    "custom_token_bans": UnservedField(([], ""), _BANNED),
    "regex": UnservedField(("",), 'send structured_outputs: {"regex": ...}'),
    "ebnf": UnservedField(("",), 'send structured_outputs: {"grammar": ...}'),
    "structural_tag": UnservedField(("",), 'send structured_outputs: {"structural_tag": ...}'),
    "stop_regex": UnservedField(("", []), "stop takes strings"),
    "custom_logit_processor": UnservedField(("",), "the engine runs no plugins; leave it out"),
}


def check_fields(fields: Mapping[str, Any], served: Collection[str]) -> list[str]:
    """Check that no field requests something that is not served.

    Args:
        fields: of a request.
        served: names that its endpoint has.

    Returns:
        The names that are neither served nor in the table.

    Raises:
        InvalidRequest: naming the first field of the table whose value requests something.
    """
    others = fields.keys() - set(served)
    if not others:
        return []
    for name, row in FIELDS.items():
        if name in others and not row.passes(fields[name], fields):
            raise InvalidRequest(f"{name} is not supported: {row.instead}", name)
    return [name for name in fields if name in others and name not in FIELDS]
