"""EngineConfig: the settings of an engine; and the only reader of the environment."""

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

from jaxserve.settings.chat_config import ChatConfig, check_chat
from jaxserve.settings.checks import exact_int, finite_float, within
from jaxserve.settings.eplb import ExpertsConfig, check_eplb
from jaxserve.settings.hosts import HostsConfig, check_hosts, too_few
from jaxserve.settings.kv_events import KVEventsConfig, events_config
from jaxserve.settings.machine import (
    VisibleCard,
    allocate_from_heap,
    driver_cards,
    visible_card,
    with_gpu_flags,
)
from jaxserve.settings.overrides import json_object
from jaxserve.settings.setting_values import OTHER_NAMES, usual_value

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

MAX_SCHEDULER_STEPS = 1024
VARIABLE_PREFIX = "JAXSERVE_"
# What Kubernetes sets for a Service that is called jaxserve.
_OF_KUBERNETES = re.compile(r"(\w+_)?SERVICE_(HOST|PORT)|PORT_\d+_|\w+=(tcp|udp|sctp)://")
# Defaults that depend on the device: (max_num_seqs, max_num_batched_tokens).
_DEVICE_DEFAULTS = {"cpu": (32, 512), "gpu": (256, 8192)}
# The part of a card's memory that XLA takes, by its newer and its older name.
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_OWN_VARIABLE = re.compile(
    "(JAX|XLA|CUDA|NVIDIA|HF|OTEL)(?!.*(KEY|TOKEN|SECRET|PASSW|HEADER|PAT$|CRED|AUTH|ATTRIB))"
)


@dataclass(frozen=True)
class EngineConfig(HostsConfig, ExpertsConfig, ChatConfig):
    """An engine's settings; names and defaults follow vLLM's `EngineArgs`.

    None means "chosen for the device and the model found"; `resolve` fills it in.

    Args:
        model: folder of a Hugging Face checkpoint, or one that `jaxserve convert` wrote; a GGUF
            file or the folder of one model's; or a name on the Hugging Face hub (org/name,
            org/name:Q4_K_M, org/name/FILE.gguf); None for the bundled demo model.
        tokenizer: folder or name of the tokenizer, the model's own by default.
        revision: branch, tag or commit of a model on the hub.
        download_dir: where models of the hub are kept; its library's own cache by default.
        hf_overrides: fields that take the place of those in config.json, as a JSON object; they are
            merged into a nested configuration, such as text_config.
        language_model_only: serve the text of a model that reads images or sound; always true here.
        generation_config: "auto" takes the checkpoint's generation_config.json for the sampling
            defaults, "vllm" takes none, else the folder of another, whose max_new_tokens then
            limits every answer of a server.
        skip_tokenizer_init: serve token ids only.
        load_format: "auto" reads what is there; "dummy" makes random weights from `seed`.
        dtype: of weights and activations; "auto" takes the checkpoint's on a GPU. On CPU it takes
            float32, or bfloat16, half the memory, if that does not fit into what is free, and
            keeps the blocks of a GGUF file, which any other dtype widens.
        quantization: keep the blocks' matrices in "int8" or "fp8" (e4m3), one scale an output, or
            in "int4": blocks of 4 to 6 bits, on a GPU codes of 4 or 8. Others are checkpoints'.
        kv_cache_dtype: "auto" is that of activations; "fp8" (e4m3) takes a half or a quarter of the
            memory, with the checkpoint's scales; "int8_per_token_head", on CPU, loses far less.
        tensor_parallel_size: devices that heads, MLPs and vocabulary are divided over; sizes of
            memory in other settings are of each. On CPU XLA_FLAGS can divide the processor into
            devices, to try it.
        max_model_len: most tokens of one sequence, prompt and output together; by default what
            the model declares, or on CPU what the default cache holds, if that is less.
        allow_long_max_model_len: let max_model_len exceed what the model declares; what answers
            that reach further are worth is unknown.
        max_num_seqs: most sequences running at once (slots).
        max_num_batched_tokens: most tokens computed in one step.
        long_prefill_token_threshold: most tokens one sequence takes of a step; 0 for no bound.
        block_size: tokens in a page of KV cache.
        gpu_memory_utilization: share of the GPU memory that is free at the start, for weights, KV
            cache and temporaries. None takes 0.9, and up to 0.95 where that leaves the cache
            fewer than 8,192 tokens; 0.8 where a card has no memory but the host's.
        kv_cache_memory_bytes: bytes of KV cache; on CPU by default 1 GiB, less where memory is
            short or fewer pages could be used, more where max_model_len needs it.
        memory_share: this engine's, of several, of the GPU's memory, or of the KV cache on CPU.
        num_gpu_blocks_override: number of pages, instead of either of the above.
        enable_prefix_caching: reuse the pages of equal prefixes.
        prefix_caching_secret: file of at least 32 random bytes, from which keys of prefixes are
            made: equal ones in all engines that share it, and otherwise in no two processes.
        kv_events_config: where changes of the prefix cache are published, as a JSON object of
            vLLM's fields, like {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}.
        scheduling_policy: "fcfs" or "priority" (lower value first, then arrival).
        async_scheduling: submit step n+1 before step n is read.
        num_scheduler_steps: most decode steps of one launch, taken where nobody waits, or only
            for a slot while none is free; None lets each launch take as many as fit into 20 ms.
        seed: of requests that bring none, and of dummy weights.
        max_logprobs: most alternatives of a token that requests may ask for, -1 for all. Above 20,
            a GPU compiles programs that keep logits, which logprob_token_ids needs there too.
        logprobs_mode: log-probabilities or logits, the model's own or what tokens are drawn from.
        attention_backend: "auto", "xla", "triton" or "mosaic_gpu".
        float32_matmul_precision: of the products of a float32 model on a GPU, under PyTorch's
            names. "highest" computes them in float32, as a CPU does; "high" rounds factors to
            TF32's 10 bits, by NVIDIA's figures 8 times as fast on an A100 for long prompts.
        decode_sizes: padded row counts compiled for steps of one token a row.
        token_sizes: padded token counts compiled for all other steps.
        compilation_cache_dir: where compiled programs are kept for the next start; "auto" is
            `jaxserve` in the user's cache folder, "none" (or None) keeps none.
        wait_for_all_programs: start only once every padded size is compiled, as on a GPU and where
            nothing is kept. Otherwise those that pad less are compiled behind the first answers.
        profile_start: file for a timeline of the start, which Perfetto shows.
        check_invariants: verify every page, slot and counter after each step (slow).

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

    def __post_init__(self) -> None:
        for name in OTHER_NAMES:
            object.__setattr__(self, name, usual_value(getattr(self, name), name))
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
        for check in (check_hosts, check_eplb, check_chat):
            check(self)
        self._check_budget()

    def _check_budget(self) -> None:
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs and tokens and tokens < seqs:
            least = f"max_num_batched_tokens ({tokens}) must be at least max_num_seqs ({seqs})"
            raise ValueError(f"{least}: every running sequence gets a token a step")

    def resolve(
        self, platform: str, model_max_len: int, sizes: tuple[int, int] | None = None
    ) -> EngineConfig:
        """Fill in every setting of a size that is None, in a copy.

        Args:
            platform: "cpu" or "gpu".
            model_max_len: positions that the model was made for.
            sizes: defaults of max_num_seqs and max_num_batched_tokens for the card's memory.

        Raises:
            ValueError: max_model_len beyond the model's, or sizes that contradict each other.
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
    """Return the variables JAXSERVE_<FIELD> of the environment, by field; VLLM_API_KEY too."""
    size, every = len(VARIABLE_PREFIX), os.environ.items()
    own = {name[size:]: value for name, value in every if name.startswith(VARIABLE_PREFIX)}
    if key := os.environ.get("VLLM_API_KEY"):
        own.setdefault("API_KEY", key)
    return {n.lower(): own[n] for n in own if not _OF_KUBERNETES.match(f"{n}={own[n]}")}


@dataclass(frozen=True)
class HubAccess:
    """Access to the Hugging Face hub, under the names of its own library.

    Attributes:
        endpoint: HF_ENDPOINT, another server than the hub itself.
        is_offline: HF_HUB_OFFLINE: nothing is fetched, the cache is read.
    """

    endpoint: str | None
    is_offline: bool


def hub_access() -> HubAccess:
    """Read the variables of the environment that concern the hub."""
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    return HubAccess(os.environ.get("HF_ENDPOINT") or None, offline)


def user_cache_dir() -> Path | None:
    """Return `jaxserve` in the user's cache folder; None where the user has no home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "jaxserve"
    except RuntimeError:
        return None


def compiler_settings() -> dict[str, str]:
    """Return the variables of the environment that change what XLA compiles."""
    names = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
    values = {name: os.environ.get(name, "") for name in names}
    # How many devices there are changes no program of one of them.
    values["XLA_FLAGS"] = re.sub(
        r"--xla_force_host_platform_device_count=\S*", "", values["XLA_FLAGS"]
    )
    return {name: value.strip() for name, value in values.items() if value.strip()}


def own_variables() -> dict[str, str]:
    """Return the variables that change what a start does, but for secrets."""
    own = {name: value for name, value in sorted(os.environ.items()) if _OWN_VARIABLE.match(name)}
    return {name: re.sub(r"(//)[^/\s]*@|\?\S*", r"\1...", own[name]) for name in own}


def traces_protocol() -> str | None:
    """Return how traces are sent, if OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says it."""
    return os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or None


def openai_api_key() -> str | None:
    """Return the key of OPENAI_API_KEY, by which a client is known to a server."""
    return os.environ.get("OPENAI_API_KEY") or None


def cards_are_hidden() -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides every card."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")


def cpu_threads() -> int:
    """Return the cores that this process may use; XLA divides a program's work by them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_cuda_plugin() -> bool:
    """Return whether JAX is installed with what opens NVIDIA's cards."""
    return any(PathFinder.find_spec(f"jax_cuda{version}_plugin") for version in (13, 12))


def check_devices(config: EngineConfig) -> None:
    """Check without JAX that this host has its part of the devices of `tensor_parallel_size`.

    Raises:
        InvalidRequest: it has fewer.
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
    """Return the card, or the cards, that JAX is to open here; None where it will run on CPU."""
    platforms = os.environ.get("JAX_PLATFORMS", "").lower()
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return None
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return visible_card(driver_cards(), os.environ.get("CUDA_VISIBLE_DEVICES"), by_bus, count)


def memory_fraction() -> float | None:
    """Return the part of a card's memory that the user allows JAX; None where nothing is said."""
    given = next((os.environ[name] for name in _FRACTIONS if os.environ.get(name)), None)
    with suppress(ValueError):  # JAX refuses it in its own words
        return None if given is None else float(given)
    return None


@contextmanager
def claimed(card: VisibleCard, fraction: float, preallocate: bool) -> Iterator[None]:
    """Make JAX open this card alone and take this part of its memory, if it starts within.

    Otherwise it takes three quarters of every card. Variables that the user has set win. They are
    put back, since a child process has to look for itself at what is free.
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
    """Prepare what must be set before JAX is imported; later calls change nothing.

    Variables that the user has set win over ours.

    Args:
        for_gpu: set what a GPU needs, whether there is one or not.
        environment: more variables.
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
