"""Every read of the environment, and the variables that JAX reads when it is imported."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from jaxserve.settings.cards import VisibleCard, driver_cards, visible_card
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.hosts import too_few
from jaxserve.settings.machine import allocate_from_heap, with_gpu_flags

VARIABLE_PREFIX = "JAXSERVE_"
# Variables that Kubernetes sets for a Service with the name jaxserve.
_OF_KUBERNETES = re.compile(r"(\w+_)?SERVICE_(HOST|PORT)|PORT_\d+_|\w+=(tcp|udp|sctp)://")
# XLA's newer and older variable for its share of a card's memory.
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_OWN_VARIABLE = re.compile(
    "(JAX|XLA|CUDA|NVIDIA|HF|OTEL)(?!.*(KEY|TOKEN|SECRET|PASSW|HEADER|PAT$|CRED|AUTH|ATTRIB))"
)


def environment_settings() -> dict[str, str]:
    """Return the values of the variables JAXSERVE_<FIELD>, by field name in lower case.

    VLLM_API_KEY sets api_key if JAXSERVE_API_KEY is not set. Variables that Kubernetes sets for a
    Service are left out.
    """
    size, every = len(VARIABLE_PREFIX), os.environ.items()
    values = {name[size:]: value for name, value in every if name.startswith(VARIABLE_PREFIX)}
    if key := os.environ.get("VLLM_API_KEY"):
        values.setdefault("API_KEY", key)
    return {n.lower(): values[n] for n in values if not _OF_KUBERNETES.match(f"{n}={values[n]}")}


@dataclass(frozen=True)
class HubAccess:
    """Settings for the Hugging Face hub, from the environment variables of its own library.

    Attributes:
        endpoint: HF_ENDPOINT, the address of a server to use instead of the hub, or None.
        is_offline: HF_HUB_OFFLINE, whether models are read from the cache only.
    """

    endpoint: str | None
    is_offline: bool


def hub_access() -> HubAccess:
    """Return the settings for the Hugging Face hub from the environment."""
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    return HubAccess(os.environ.get("HF_ENDPOINT") or None, offline)


def user_cache_dir() -> Path | None:
    """Return the folder `jaxserve` in the user's cache folder, or None if the user has no home.

    The cache folder is XDG_CACHE_HOME, or else ~/.cache.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "jaxserve"
    except RuntimeError:
        return None


def compiler_settings() -> dict[str, str]:
    """Return by name the non-empty environment variables that change the programs XLA compiles.

    The flag for the number of CPU devices is removed from XLA_FLAGS.
    """
    names = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
    values = {name: os.environ.get(name, "") for name in names}
    # The number of devices does not change the program of one device.
    values["XLA_FLAGS"] = re.sub(
        r"--xla_force_host_platform_device_count=\S*", "", values["XLA_FLAGS"]
    )
    return {name: value.strip() for name, value in values.items() if value.strip()}


def own_variables() -> dict[str, str]:
    """Return the environment variables that can change a start, by name, for a report.

    Names that may contain secrets are left out. Credentials and queries are removed from URLs.
    """
    variables = sorted(os.environ.items())
    values = {name: value for name, value in variables if _OWN_VARIABLE.match(name)}
    return {name: re.sub(r"(//)[^/\s]*@|\?\S*", r"\1...", text) for name, text in values.items()}


def traces_protocol() -> str | None:
    """Return OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, the protocol for traces, or None if not set."""
    return os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or None


def openai_api_key() -> str | None:
    """Return OPENAI_API_KEY, with which a client authenticates to a server, or None if not set."""
    return os.environ.get("OPENAI_API_KEY") or None


def cards_are_hidden() -> bool:
    """Return whether CUDA_VISIBLE_DEVICES is empty or -1, so that CUDA sees no card."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")


def has_cuda_plugin() -> bool:
    """Return whether JAX's plugin for CUDA 13 or 12 is installed. It is not imported."""
    return any(PathFinder.find_spec(f"jax_cuda{version}_plugin") for version in (13, 12))


def check_devices(config: EngineConfig) -> None:
    """Check, before JAX is imported, that this host has its share of the engine's devices.

    Raises:
        InvalidRequest: the host has fewer devices than `tensor_parallel_size` / `nnodes`.
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
    """Return the `count` cards for JAX to open, or None if JAX will run on the CPU.

    JAX_PLATFORMS, CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER determine the choice (see
    `visible_card`).
    """
    platforms = os.environ.get("JAX_PLATFORMS", "").lower()
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return None
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return visible_card(driver_cards(), os.environ.get("CUDA_VISIBLE_DEVICES"), by_bus, count)


def memory_fraction() -> float | None:
    """Return the share of a card's memory for JAX in XLA_CLIENT_MEM_FRACTION, or None.

    The variable's older name, XLA_PYTHON_CLIENT_MEM_FRACTION, is read too. None means that neither
    is set, or that the number is malformed.
    """
    text = next((os.environ[name] for name in _FRACTIONS if os.environ.get(name)), None)
    with suppress(ValueError):  # JAX itself reports a malformed number
        return None if text is None else float(text)
    return None


@contextmanager
def claimed(card: VisibleCard, fraction: float, preallocate: bool) -> Iterator[None]:
    """Return a context in which JAX, if it starts there, opens only the given cards.

    The context sets CUDA_VISIBLE_DEVICES and XLA's variables for memory, and restores them at its
    end, so that a child process measures free memory itself. Variables that the user has set are
    not changed.

    Args:
        card: the cards to open.
        fraction: share of each card's memory for JAX.
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
    """Set the environment variables that JAX and Hugging Face's libraries read on import.

    If JAX has been imported already, no variable is set. Variables of the user take precedence. For
    a GPU XLA_FLAGS gets the flags of `gpu_flags`. On a CPU, memory is allocated from the heap
    (`allocate_from_heap`).

    Args:
        for_gpu: set the variables for a GPU even if this machine has none.
        environment: further variables by name.
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
