"""EngineConfig, the settings of an engine."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from jaxserve.errors import InvalidRequest
from jaxserve.settings.checks import (
    ContentFormat,
    check_content_format,
    exact_int,
    finite_float,
    within,
)
from jaxserve.settings.compat import suggestion, table
from jaxserve.settings.eplb import ExpertsConfig, check_eplb
from jaxserve.settings.hosts import HostsConfig, check_hosts
from jaxserve.settings.kv_events import KVEventsConfig, events_config
from jaxserve.settings.overrides import json_object

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
POLICIES = ("fcfs", "priority")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
Quantization = Literal["int8", "fp8", "int4", "awq", "gptq", "compressed-tensors", "bitsandbytes",
                       "modelopt", "auto-round", "fbgemm_fp8"]  # fmt: skip
QUANTIZATIONS = get_args(Quantization)
KV_CACHE_DTYPES = ("auto", "fp8", "int8_per_token_head")
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
IMPLEMENTATIONS = ("auto", "xla", "triton", "mosaic_gpu")
PRECISIONS = ("highest", "high")
# Settings some of whose values have other names in vLLM or PyTorch.
_RENAMED_VALUES: dict[str, tuple[Any, ...]] = {
    "dtype": DTYPES,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "quantization": (None, *QUANTIZATIONS),
}

MAX_SCHEDULER_STEPS = 1024
# Defaults that depend on the device: (max_num_seqs, max_num_batched_tokens).
PAGE_TOKENS = 16
"""Number of tokens of the smallest pages by default."""
_DEVICE_DEFAULTS = {"cpu": (32, 512), "gpu": (256, 8192)}


def usual_value(value: Any, name: str) -> Any:
    """Return jaxserve's name for the value of a setting, translated from a name of vLLM or PyTorch.

    A value without a translation is returned unchanged.

    Raises:
        InvalidRequest: jaxserve does not serve the value. The message has a suggestion.
    """
    row = table()["setting_values"].get(name, {}).get(value) if isinstance(value, str) else None
    if row is not None and "here" not in row:
        raise InvalidRequest(f"{name}={value!r} is not supported: {suggestion(row)}", name)
    return value if row is None else row["here"]


@dataclass(frozen=True)
class EngineConfig(HostsConfig, ExpertsConfig):
    """Settings of an engine. Names and defaults follow vLLM's `EngineArgs`.

    None means "chosen for the device and the model", which `resolve` does.

    Args:
        model: a folder with a Hugging Face checkpoint, a folder that `jaxserve convert` wrote, a
            GGUF file, the folder of a divided GGUF file, or a name on the Hugging Face hub
            (org/name, org/name:Q4_K_M, org/name/FILE.gguf). None is the bundled demo model.
        tokenizer: folder or hub name of the tokenizer. The default is that of the model.
        revision: branch, tag or commit of a model on the hub.
        download_dir: folder for models from the hub. The default is the hub library's own cache.
        hf_overrides: a JSON object of fields that replace fields of config.json. Fields of a nested
            configuration, such as text_config, are merged into it.
        language_model_only: serve the text of a model that also reads images or sound. Always true.
        generation_config: "auto" takes sampling defaults from the checkpoint's
            generation_config.json, "vllm" takes vLLM's defaults. Any other value is a folder with
            such a file, whose max_new_tokens then limits every answer of a server.
        skip_tokenizer_init: load no tokenizer and serve token ids only.
        load_format: "auto" reads the model's files, "dummy" makes random weights from `seed`.
        dtype: dtype of weights and activations. On a GPU "auto" is the checkpoint's dtype. On a
            CPU "auto" is float32, or bfloat16 (half the memory) if float32 does not fit into the
            free memory, and keeps a GGUF file quantized, which any other dtype expands.
        quantization: "int8" or "fp8" (e4m3) quantizes the matrices of the transformer layers with
            one scale for each output, "int4" quantizes them in blocks of 4 to 6 bits, on a GPU in
            codes of 4 or 8 bits. The other values name the format of a quantized checkpoint.
        kv_cache_dtype: "auto" is the dtype of activations. "fp8" (e4m3) takes a half or a quarter
            of the memory, with the scales of the checkpoint. "int8_per_token_head", on a CPU,
            loses far less accuracy.
        tensor_parallel_size: number of devices over which attention heads, MLPs and the vocabulary
            are divided. Other settings give memory per device. For a trial on a CPU, XLA_FLAGS
            can divide the processor into devices.
        max_model_len: largest number of tokens of a sequence, prompt and output together. The
            default is the model's own limit, or on a CPU the size of the default KV cache if that
            is smaller.
        allow_long_max_model_len: let max_model_len exceed the limit that the model declares. The
            quality of longer answers is unknown.
        max_num_seqs: largest number of sequences that run at once (slots).
        max_num_batched_tokens: largest number of tokens computed in one step.
        long_prefill_token_threshold: largest number of tokens of one sequence in a step, 0 for no
            limit.
        block_size: number of tokens in a block of KV cache, by default 16 for the layers with the
            most bytes of cache, and a multiple of it if other layers have fewer. Without such a
            difference a block is a page.
        gpu_memory_utilization: share of the GPU memory free at the start, for weights, KV cache
            and temporary buffers. The default is 0.9, up to 0.95 if the KV cache would have fewer
            than 8,192 tokens, and 0.8 for a card that shares the memory of the host.
        kv_cache_memory_bytes: size of the KV cache in bytes. On a CPU the default is 1 GiB, less if
            memory is short or fewer pages can be used, more if max_model_len needs it.
        state_cache_bytes: size of the states of prefixes in bytes, for models whose layers keep a
            state. The default is a tenth of the KV cache, or all of it if no layer has pages. 0
            disables the reuse of prefixes.
        memory_share: this engine's share of the GPU memory, or of the KV cache on a CPU, if
            several engines run.
        num_gpu_blocks_override: number of pages, instead of a size derived from memory.
        enable_prefix_caching: reuse the pages of equal prefixes.
        prefix_caching_secret: file of at least 32 random bytes, from which the keys of prefixes
            are derived. Engines that share the file compute equal keys, others never do.
        kv_events_config: where changes of the prefix cache are published, as a JSON object of
            vLLM's fields, like {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}.
        scheduling_policy: "fcfs" or "priority" (lower value first, then arrival).
        async_scheduling: submit step n+1 before the results of step n are read.
        num_scheduler_steps: largest number of decode steps in one launch. Several are taken if no
            request waits, or if all waiting requests need a slot and every slot is in use. None
            lets each launch take as many as fit into 20 ms.
        seed: seed of requests without one, and of dummy weights.
        max_logprobs: largest number of alternatives of a token that requests may ask for, -1 for
            all. Above 20 a GPU compiles programs that keep logits, which logprob_token_ids needs
            there too.
        logprobs_mode: whether log-probabilities or logits are returned, raw (of the model) or
            processed (from which tokens are drawn).
        attention_backend: "auto", "xla", "triton" or "mosaic_gpu".
        float32_matmul_precision: precision of matrix products of a float32 model on a GPU, under
            PyTorch's names. "highest" computes in float32, as a CPU does. "high" rounds factors to
            TF32's 10 bits, by NVIDIA's figures 8 times as fast on an A100 for long prompts.
        decode_sizes: padded row counts of the programs for steps of one token per row.
        token_sizes: padded token counts of the programs for all other steps.
        compilation_cache_dir: folder for compiled programs, which later starts load. "auto" is
            `jaxserve` in the user's cache folder, "none" (or None) stores no programs.
        wait_for_all_programs: start only after every padded size is compiled, as always on a GPU
            and without a folder for programs. Otherwise programs with less padding are compiled
            in the background of the first answers.
        profile_start: file for a timeline of the start in the format of Perfetto.
        check_invariants: verify every page, slot and counter after each step (slow).
        chat_template_content_format: form in which the chat template receives content: "string" as
            text, "openai" as a list of parts, "auto" as the template expects it.

    Raises:
        InvalidRequest: (a ValueError) on construction, naming the field.
    """

    model: str | Path | None = None
    tokenizer: str | Path | None = None
    revision: str | None = None
    download_dir: str | Path | None = None
    hf_overrides: dict[str, Any] | str | None = None
    language_model_only: bool = True
    generation_config: str = "auto"
    skip_tokenizer_init: bool = False
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    dtype: str = "auto"
    quantization: Quantization | None = None
    kv_cache_dtype: Literal["auto", "fp8", "int8_per_token_head"] = "auto"
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    allow_long_max_model_len: bool = False
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    block_size: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    state_cache_bytes: int | None = None
    memory_share: float = 1.0
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    prefix_caching_secret: str | Path | None = None
    kv_events_config: dict[str, Any] | str | KVEventsConfig | None = None
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool = True
    num_scheduler_steps: int | None = None
    seed: int = 0
    max_logprobs: int = 20
    logprobs_mode: LogprobsMode = "raw_logprobs"
    attention_backend: str = "auto"
    float32_matmul_precision: Literal["highest", "high"] = "highest"
    decode_sizes: tuple[int, ...] | None = None
    token_sizes: tuple[int, ...] | None = None
    compilation_cache_dir: str | Path | None = "auto"
    wait_for_all_programs: bool = False
    profile_start: str | Path | None = None
    check_invariants: bool = False
    chat_template_content_format: ContentFormat = "auto"

    def __post_init__(self) -> None:
        for name, values in _RENAMED_VALUES.items():
            value = getattr(self, name)
            if value not in values:
                object.__setattr__(self, name, usual_value(value, name))
        for name, low, high in (
            ("tensor_parallel_size", 1, 1024),
            ("max_model_len", 2, 2**27),
            ("max_num_seqs", 1, 2**16),
            ("max_num_batched_tokens", 1, 2**22),
            ("kv_cache_memory_bytes", 1, 2**50),
            ("num_gpu_blocks_override", 2, 2**31 - 1),
            ("state_cache_bytes", 0, 2**50),
            ("num_scheduler_steps", 1, MAX_SCHEDULER_STEPS),
            ("long_prefill_token_threshold", 0, 2**22),
            ("block_size", 1, 1024),
            ("seed", 0, 2**64 - 1),
            ("max_logprobs", -1, 2**31 - 1),
        ):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, exact_int(getattr(self, name), name, low, high))
        if not 0.0 < finite_float(self.memory_share, "memory_share") <= 1.0:
            raise ValueError(f"memory_share must be in (0, 1], got {self.memory_share}")
        if self.gpu_memory_utilization is not None:
            within(self.gpu_memory_utilization, "gpu_memory_utilization", 0.05, 1.0)
        for name, allowed in (
            ("dtype", DTYPES),
            ("quantization", (None, *QUANTIZATIONS)),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("scheduling_policy", POLICIES),
            ("load_format", LOAD_FORMATS),
            ("logprobs_mode", get_args(LogprobsMode)),
            ("attention_backend", IMPLEMENTATIONS),
            ("float32_matmul_precision", PRECISIONS),
        ):
            if getattr(self, name) not in allowed:
                names = ", ".join(map(str, allowed))
                raise ValueError(f"{name} must be one of {names}; got {getattr(self, name)!r}")
        object.__setattr__(self, "hf_overrides", json_object(self.hf_overrides, "hf_overrides"))
        object.__setattr__(self, "kv_events_config", events_config(self.kv_events_config))
        if self.language_model_only is not True:
            raise ValueError("language_model_only must be true: only text is served")
        check_hosts(self)
        check_eplb(self)
        check_content_format(self.chat_template_content_format)
        self._check_budget()

    def _check_budget(self) -> None:
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs and tokens and tokens < seqs:
            least = f"max_num_batched_tokens ({tokens}) must be at least max_num_seqs ({seqs})"
            raise ValueError(f"{least}: every running sequence gets a token a step")

    def resolve(
        self,
        platform: str,
        model_max_len: int,
        sizes: tuple[int, int] | None = None,
        splits: int = 1,
    ) -> EngineConfig:
        """Return a copy in which block_size and the settings of sizes are set.

        The settings are max_model_len, max_num_seqs and max_num_batched_tokens.

        Args:
            platform: "cpu" or "gpu", which determines the defaults.
            model_max_len: largest number of positions that the model declares.
            sizes: defaults of max_num_seqs and max_num_batched_tokens for the card's memory,
                instead of those for the platform.
            splits: most pages of a layer into which the tokens of a block are divided.

        Raises:
            ValueError: max_model_len exceeds the model's limit, sizes contradict each other, or
                block_size is not a multiple of `splits`.
        """
        seqs, tokens = sizes or _DEVICE_DEFAULTS.get(platform, _DEVICE_DEFAULTS["gpu"])
        max_len = self.max_model_len or model_max_len
        if max_len > model_max_len and not self.allow_long_max_model_len:
            raise ValueError(
                f"max_model_len ({max_len}) is beyond the {model_max_len} positions that the "
                "model's config.json declares; allow_long_max_model_len serves it all the same"
            )
        block_size = self.block_size or PAGE_TOKENS * splits
        if block_size % splits:
            raise ValueError(
                f"block_size is {block_size}, and some layers of this model divide it among "
                f"{splits} pages; allowed: a multiple of {splits}"
            )
        max_seqs = self.max_num_seqs or min(seqs, self.max_num_batched_tokens or seqs)
        resolved = replace(
            self,
            block_size=block_size,
            max_model_len=max_len,
            max_num_seqs=max_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens or max(tokens, max_seqs),
        )
        resolved._check_budget()
        return resolved


def slots_of(config: EngineConfig, default: int = 0) -> int:
    """Return max_num_seqs, the most sequences that run at once, or `default` if it is not set."""
    return config.max_num_seqs or default


def bundled_model() -> Path:
    """Return the folder of the demo checkpoint that comes with the package."""
    return Path(__file__).parent.parent / "demo_model"


def cpu_threads() -> int:
    """Return the number of processor cores that this process may use.

    XLA divides a CPU program's work by it.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
