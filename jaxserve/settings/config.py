"""EngineConfig, the settings of an engine, and every read of the environment."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal, get_args

from jaxserve.errors import InvalidRequest
from jaxserve.settings.cards import VisibleCard, driver_cards, visible_card
from jaxserve.settings.checks import (
    ContentFormat,
    check_content_format,
    exact_int,
    finite_float,
    within,
)
from jaxserve.settings.compat import suggestion, table
from jaxserve.settings.eplb import ExpertsConfig, check_eplb
from jaxserve.settings.hosts import HostsConfig, check_hosts, too_few
from jaxserve.settings.kv_events import KVEventsConfig, events_config
from jaxserve.settings.machine import allocate_from_heap, with_gpu_flags
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
VARIABLE_PREFIX = "JAXSERVE_"
# Variables that Kubernetes sets for a Service with the name jaxserve.
_OF_KUBERNETES = re.compile(r"(\w+_)?SERVICE_(HOST|PORT)|PORT_\d+_|\w+=(tcp|udp|sctp)://")
# Defaults that depend on the device: (max_num_seqs, max_num_batched_tokens).
_DEVICE_DEFAULTS = {"cpu": (32, 512), "gpu": (256, 8192)}
# XLA's newer and older variable for its share of a card's memory.
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_OWN_VARIABLE = re.compile(
    "(JAX|XLA|CUDA|NVIDIA|HF|OTEL)(?!.*(KEY|TOKEN|SECRET|PASSW|HEADER|PAT$|CRED|AUTH|ATTRIB))"
)


def usual_value(value: Any, name: str) -> Any:
    """Return jaxserve's name for the value of a setting that has another name in vLLM.

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
        block_size: number of tokens in a page of KV cache.
        gpu_memory_utilization: share of the GPU memory free at the start, for weights, KV cache
            and temporary buffers. The default is 0.9, up to 0.95 if the KV cache would have fewer
            than 8,192 tokens, and 0.8 for a card that shares the memory of the host.
        kv_cache_memory_bytes: size of the KV cache in bytes. On a CPU the default is 1 GiB, less if
            memory is short or fewer pages can be used, more if max_model_len needs it.
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
    block_size: int = 16
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
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
        self, platform: str, model_max_len: int, sizes: tuple[int, int] | None = None
    ) -> EngineConfig:
        """Return a copy in which no size is None.

        Args:
            platform: "cpu" or "gpu".
            model_max_len: largest number of positions that the model declares.
            sizes: defaults of max_num_seqs and max_num_batched_tokens for the card's memory.

        Raises:
            ValueError: max_model_len exceeds the model's limit, or sizes contradict each other.
        """
        seqs, tokens = sizes or _DEVICE_DEFAULTS.get(platform, _DEVICE_DEFAULTS["gpu"])
        max_len = self.max_model_len or model_max_len
        if max_len > model_max_len and not self.allow_long_max_model_len:
            raise ValueError(
                f"max_model_len ({max_len}) is beyond the {model_max_len} positions that the "
                "model's config.json declares; allow_long_max_model_len serves it all the same"
            )
        max_seqs = self.max_num_seqs or min(seqs, self.max_num_batched_tokens or seqs)
        resolved = replace(
            self,
            max_model_len=max_len,
            max_num_seqs=max_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens or max(tokens, max_seqs),
        )
        resolved._check_budget()
        return resolved


def slots_of(config: EngineConfig, default: int = 0) -> int:
    """Return the most sequences that run at once; `default` if the settings leave it open."""
    return config.max_num_seqs or default


def bundled_model() -> Path:
    """Return the folder of the checkpoint that comes with the package."""
    return Path(__file__).parent.parent / "demo_model"


def environment_settings() -> dict[str, str]:
    """Return the variables JAXSERVE_<FIELD> by field. VLLM_API_KEY sets the field api_key."""
    size, every = len(VARIABLE_PREFIX), os.environ.items()
    values = {name[size:]: value for name, value in every if name.startswith(VARIABLE_PREFIX)}
    if key := os.environ.get("VLLM_API_KEY"):
        values.setdefault("API_KEY", key)
    return {n.lower(): values[n] for n in values if not _OF_KUBERNETES.match(f"{n}={values[n]}")}


@dataclass(frozen=True)
class HubAccess:
    """Settings for the Hugging Face hub, from the variables of its own library.

    Attributes:
        endpoint: HF_ENDPOINT, a server to use instead of the hub.
        is_offline: HF_HUB_OFFLINE, read models from the cache only.
    """

    endpoint: str | None
    is_offline: bool


def hub_access() -> HubAccess:
    """Read the settings for the hub from the environment."""
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    return HubAccess(os.environ.get("HF_ENDPOINT") or None, offline)


def user_cache_dir() -> Path | None:
    """Return `jaxserve` in the user's cache folder, or None for a user without a home folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "jaxserve"
    except RuntimeError:
        return None


def compiler_settings() -> dict[str, str]:
    """Return the variables of the environment that change the programs XLA compiles."""
    names = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
    values = {name: os.environ.get(name, "") for name in names}
    # The number of devices does not change the program of one device.
    values["XLA_FLAGS"] = re.sub(
        r"--xla_force_host_platform_device_count=\S*", "", values["XLA_FLAGS"]
    )
    return {name: value.strip() for name, value in values.items() if value.strip()}


def own_variables() -> dict[str, str]:
    """Return the variables that can change a start, without secrets."""
    variables = sorted(os.environ.items())
    values = {name: value for name, value in variables if _OWN_VARIABLE.match(name)}
    return {name: re.sub(r"(//)[^/\s]*@|\?\S*", r"\1...", text) for name, text in values.items()}


def traces_protocol() -> str | None:
    """Return OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, the protocol for traces, or None."""
    return os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or None


def openai_api_key() -> str | None:
    """Return OPENAI_API_KEY, with which a client authenticates to a server, or None."""
    return os.environ.get("OPENAI_API_KEY") or None


def cards_are_hidden() -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides every card."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")


def cpu_threads() -> int:
    """Return the number of cores for this process. XLA divides a program's work by it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_cuda_plugin() -> bool:
    """Return whether a CUDA plugin of JAX is installed."""
    return any(PathFinder.find_spec(f"jax_cuda{version}_plugin") for version in (13, 12))


def check_devices(config: EngineConfig) -> None:
    """Check, before JAX is imported, that this host has its part of the devices.

    Raises:
        InvalidRequest: the host has fewer devices than its part of `tensor_parallel_size`.
    """
    devices = config.tensor_parallel_size // config.nnodes
    if not _runs_on_cpu():
        visible, platform = len(driver_cards()) or devices, "cuda"
    else:
        flags = os.environ.get("XLA_FLAGS", "")
        counts = re.findall(r"--xla_force_host_platform_device_count=(\d+)", flags)
        count = os.environ.get("JAX_NUM_CPU_DEVICES") or (counts or ["1"])[-1]
        visible, platform = int(count) if count.isdecimal() else devices, "cpu"
    if visible < devices:
        raise too_few(devices, visible, platform)


def card_to_open(count: int = 1) -> VisibleCard | None:
    """Return the `count` cards for JAX to open, or None if JAX will run on the CPU."""
    platforms = os.environ.get("JAX_PLATFORMS", "").lower()
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return None
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return visible_card(driver_cards(), os.environ.get("CUDA_VISIBLE_DEVICES"), by_bus, count)


def memory_fraction() -> float | None:
    """Return the share of a card's memory that the user's variables allow JAX, or None."""
    text = next((os.environ[name] for name in _FRACTIONS if os.environ.get(name)), None)
    with suppress(ValueError):  # JAX itself reports a malformed number
        return None if text is None else float(text)
    return None


@contextmanager
def claimed(card: VisibleCard, fraction: float, preallocate: bool) -> Iterator[None]:
    """Set variables so that JAX, if it starts in the context, opens only this card.

    By default JAX would take three quarters of every card. Variables of the user take precedence.
    The variables are restored afterwards, so that a child process measures free memory itself.

    Args:
        card: the card to open, or several.
        fraction: share of the card's memory for JAX.
        preallocate: allocate that memory at the start.
    """
    values: dict[str, str] = {}
    if "JAX_CUDA_VISIBLE_DEVICES" not in os.environ:
        values["CUDA_VISIBLE_DEVICES"] = card.setting
    if not any(os.environ.get(name) for name in _FRACTIONS):  # JAX refuses both at once
        values[_FRACTIONS[0]] = f"{fraction:.4f}"
    if not preallocate and not os.environ.get(_PREALLOCATE):
        values[_PREALLOCATE] = "false"
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in before:
            del os.environ[name]
        os.environ.update({name: old for name, old in before.items() if old is not None})


def _runs_on_cpu() -> bool:
    platforms = os.environ.get("JAX_PLATFORMS", "").lower()
    return platforms == "cpu" if platforms else not (has_cuda_plugin() and driver_cards())


def prepare_process(for_gpu: bool = False, **environment: Any) -> None:
    """Set the variables that JAX reads when it is imported, unless it already is.

    Variables of the user take precedence. On a CPU, memory is allocated from the heap.

    Args:
        for_gpu: set the variables for a GPU even if this machine has none.
        environment: further variables.
    """
    if "jax" in sys.modules:
        return
    if for_gpu or not _runs_on_cpu():
        os.environ["XLA_FLAGS"] = with_gpu_flags(os.environ.get("XLA_FLAGS", ""))
    elif sys.platform == "linux":
        allocate_from_heap()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name, value in environment.items():
        os.environ.setdefault(name, str(value))
