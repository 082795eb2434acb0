"""Names of vLLM's engine arguments that are no settings here, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxserve.errors import InvalidRequest


class Unserved(NamedTuple):
    """An argument that is not served.

    Attributes:
        neutral: values that change nothing, and pass.
        instead: what to do where another was given.
    """

    neutral: tuple[Any, ...]
    instead: str


_ONE_DEVICE = "one device serves a model here: start a server for each"
_LORA = "adapters are not served: merge them into the checkpoint"
_TEXT_ONLY = "only text is served: leave it out"
_SIZES = "every step is a compiled program: decode_sizes and token_sizes choose their sizes"
_NO_SWAP = "weights and cache stay on the device: set kv_cache_memory_bytes, or quantization"
_CONFIG = "set it in hf_overrides, an object that takes the place of fields of config.json"

UNSERVED: dict[str, Unserved] = {
    "tensor_parallel_size": Unserved((1,), _ONE_DEVICE),
    "pipeline_parallel_size": Unserved((1,), _ONE_DEVICE),
    "data_parallel_size": Unserved((1,), _ONE_DEVICE),
    "enable_expert_parallel": Unserved((False,), _ONE_DEVICE),
    "distributed_executor_backend": Unserved(("uni",), _ONE_DEVICE),
    "disable_custom_all_reduce": Unserved((True, False), _ONE_DEVICE),
    "enforce_eager": Unserved(
        (False,), f"{_SIZES}, and `jaxserve compile` builds them ahead of a start"
    ),
    "compilation_config": Unserved(({}, 0), _SIZES),
    "cuda_graph_sizes": Unserved(([],), _SIZES),
    "max_seq_len_to_capture": Unserved((), _SIZES),
    "enable_chunked_prefill": Unserved(
        (True,), "prompts are always computed in chunks: max_num_batched_tokens bounds them"
    ),
    "trust_remote_code": Unserved(
        (False,), "no code of a checkpoint is run, and what would need it is refused: leave it out"
    ),
    "swap_space": Unserved((0,), _NO_SWAP),
    "cpu_offload_gb": Unserved((0,), _NO_SWAP),
    "preemption_mode": Unserved(("recompute",), "preempted requests are computed again"),
    "disable_log_stats": Unserved((True, False), "read LLM.stats(), or /metrics of a server"),
    "enable_lora": Unserved((False,), _LORA),
    "lora_modules": Unserved(([],), _LORA),
    "tokenizer_mode": Unserved(("auto",), "tokenizer.json is read: name a folder with `tokenizer`"),
    "tokenizer_revision": Unserved((), "`revision` is that of model and tokenizer"),
    "code_revision": Unserved((), "no code of a checkpoint is run: leave it out"),
    "config_format": Unserved(("auto", "hf"), "config.json is read"),
    "rope_scaling": Unserved(({},), _CONFIG),
    "rope_theta": Unserved((), _CONFIG),
    "hf_token": Unserved((), "set HF_TOKEN in the environment"),
    "override_generation_config": Unserved(
        ({},), "name a folder with `generation_config`, or set SamplingParams"
    ),
    "task": Unserved(("auto", "generate"), "models generate text here, and nothing else"),
    "runner": Unserved(("auto", "generate"), "models generate text here, and nothing else"),
    "model_impl": Unserved(("auto", "vllm"), "models are jaxserve's own"),
    "device": Unserved(("auto",), "set JAX_PLATFORMS in the environment"),
    "speculative_config": Unserved(
        ({},), "no draft model is used: num_scheduler_steps makes launches of several steps"
    ),
    "limit_mm_per_prompt": Unserved(({},), _TEXT_ONLY),
    "mm_processor_kwargs": Unserved(({},), _TEXT_ONLY),
    "allowed_local_media_path": Unserved(("",), _TEXT_ONLY),
    "max_logprobs": Unserved((20,), "requests may ask for up to 20"),
    "guided_decoding_backend": Unserved(("auto", "guidance"), "forms are compiled by llguidance"),
    "kv_transfer_config": Unserved(({},), "prompts are computed where answers are"),
    "enable_sleep_mode": Unserved((False,), "LLM.close frees the device; make another one"),
    "enable_prompt_embeds": Unserved((False,), "prompts are text or token ids"),
    "disable_log_requests": Unserved((True, False), "requests are never logged"),
    "chat_template": Unserved((), "put chat_template.jinja into a copy of the checkpoint"),
    "ssl_keyfile": Unserved((), "put a proxy that ends TLS before the server"),
    "ssl_certfile": Unserved((), "put a proxy that ends TLS before the server"),
    "root_path": Unserved(("",), "let the proxy before the server take the prefix off"),
}


def is_neutral(value: Any, neutral: Iterable[Any]) -> bool:
    """Return whether a value requests nothing: it equals one of `neutral` and has its type."""
    return any(type(value) is type(other) and value == other for other in neutral)


def refuse_unsupported(
    fields: Mapping[Any, Any], unsupported: Mapping[str, tuple[Any, ...]], by: str = ""
) -> None:
    """Refuse fields that would otherwise be ignored silently.

    Args:
        fields: of a request.
        unsupported: names that are known and not supported, each with its neutral values.
        by: ends the message, such as " by this server".

    Raises:
        InvalidRequest: naming a field of `unsupported` whose value requests something.
    """
    for name in sorted(fields.keys() & unsupported.keys()):
        if not is_neutral(fields[name], unsupported[name]):
            raise InvalidRequest(f"{name} is not supported{by}", name)


def served(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those of `UNSERVED` that change nothing, None included.

    Raises:
        InvalidRequest: naming one that would change something, and what to do instead.
    """
    for name, value in settings.items():
        row = UNSERVED.get(name)
        if row is None or value is None:
            continue
        if not any(
            isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
            for neutral in row.neutral
        ):
            raise InvalidRequest(f"{name}={value!r} is not supported: {row.instead}", name)
    return {name: value for name, value in settings.items() if name not in UNSERVED}
