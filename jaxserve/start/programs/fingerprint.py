# pyright: reportUnknownMemberType=false
"""The values that a compiled program depends on, by which its file is found or refused."""

from __future__ import annotations

import dataclasses
import hashlib
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxserve.execution.mesh import spec_of
from jaxserve.execution.typed_jax import devices
from jaxserve.models import ModelConfig
from jaxserve.settings.config import cpu_threads
from jaxserve.settings.environment import compiler_settings
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.start.plan.sum_options import sum_options
from jaxserve.start.programs.described_card import DescribedCard
from jaxserve.start.programs.store import ProgramStore
from pallas_kernels.devices import target_device

_PACKAGES = Path(__file__).parent.parent.parent.parent
# The files that programs are traced from.
_SOURCES = (
    "pallas_kernels",
    "jaxserve/execution",
    "jaxserve/models",
    "jaxserve/weights",
    "jaxserve/start/programs/compiler.py",
    "jaxserve/request.py",
    "jaxserve/scheduling/slot_table.py",
    "jaxserve/scheduling/page_kinds.py",
    "jaxserve/scheduling/row_settings.py",
)
# Settings that change a program only through its name, the shapes of its arguments or the model's
# configuration, each of which is compared by itself.
_NOT_COMPILED = frozenset(
    """
    model tokenizer skip_tokenizer_init load_format seed chat_template_content_format
    gpu_memory_utilization kv_cache_memory_bytes state_cache_bytes memory_share
    num_gpu_blocks_override
    enable_prefix_caching scheduling_policy async_scheduling long_prefill_token_threshold
    compilation_cache_dir check_invariants wait_for_all_programs profile_start
    prefix_caching_secret kv_events_config master_addr master_port nodes_secret max_logprobs
    logprobs_mode hf_overrides language_model_only allow_long_max_model_len eplb_config
    decode_sizes token_sizes
    """.split()
)


def open_store(
    directory: Path | None,
    plan: StartPlan,
    card: DescribedCard | None = None,
    store_class: type[ProgramStore] | None = None,
) -> ProgramStore:
    """Return the store of a plan's programs.

    Args:
        directory: folder of the programs of all plans, or None to keep no files.
        plan: plan of the start.
        card: card to compile for, if it is not JAX's device.
        store_class: class of the store, or None for `ProgramStore`.

    Raises:
        InvalidRequest: see `sum_options`.
    """
    config = plan.config
    settings = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in _NOT_COMPILED
    }
    leaves = [f"{x.dtype}{list(x.shape)}{_division(x)}" for x in plan.model.leaves]
    device = devices()[0]
    subject: dict[str, Any] = {
        "settings": repr(sorted(settings.items())),
        "model": repr(plan.model_config),
        "leaves": leaves,
        "asked_sizes": [config.decode_sizes, config.token_sizes],
        "device": device.device_kind if card is None else card.card.name,
        # A card's programs do not depend on the threads of its host.
        "threads": cpu_threads() if card is None and device.platform == "cpu" else 0,
    }
    number = plan.model_config.split.devices
    options = sum_options(config, target_device() if card is None else card.card.limits)
    make_store = store_class or ProgramStore
    return make_store(directory, subject, fingerprint(card), card is None, number, options)


def _division(leaf: Any) -> str:
    spec = spec_of(leaf)
    return f" {spec}" if any(spec) else ""


def fingerprint(card: DescribedCard | None = None) -> dict[str, Any]:
    """Return by name the facts on which compiled programs depend beside the plan.

    They are versions of packages, the device and processor, settings of the compiler, and a digest
    of the source files.

    Args:
        card: an absent card. Facts about its machine are then None, which means unknown.
    """
    device = devices()[0]
    is_cpu = card is None and device.platform == "cpu"
    name = f"{device.platform} {device.device_kind}" if card is None else f"gpu {card.card.name}"
    return {
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "flax": metadata.version("flax"),
        "device": name,
        "platform": device.client.platform_version if card is None else None,
        "cpu": f"{_cpu_features()}, {cpu_threads()} threads" if is_cpu else None,
        "compiler_settings": compiler_settings()
        | {
            name: str(getattr(jax.config, name, None))
            for name in ("jax_enable_x64", "jax_default_matmul_precision", "jax_debug_nans")
        },
        "source": _source_digest(),
    }


def host_facts(plan: StartPlan, declared: ModelConfig) -> dict[str, str]:
    """Return by name the facts, beside the settings, that must be equal on all hosts of an engine.

    They are the dtype, the versions of JAX and of the source, and a digest of the model's
    configuration.

    Args:
        plan: plan of this host's start.
        declared: the model's configuration as its files declare it.
    """
    versions = fingerprint()
    return {
        "dtype": str(plan.dtype),
        "jax": versions["jax"],
        "jaxserve": versions["source"],
        "config.json": hashlib.blake2b(repr(declared).encode(), digest_size=8).hexdigest(),
    }


def _cpu_features() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("flags", "Features", "model name", "CPU part")
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    parts = [f"{key.strip()}:{value}" for key, value in lines.items() if key.strip() in names]
    return f"{platform.machine()} {hashlib.sha256(repr(sorted(parts)).encode()).hexdigest()[:16]}"


def _source_digest() -> str:
    digest = hashlib.sha256()
    for source in _SOURCES:
        path = _PACKAGES / source
        if not path.exists():  # without this check its later edits would not change the digest
            raise FileNotFoundError(f"programs are traced from {path}, which is not there")
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.suffix in (".py", ".json"):
                digest.update(str(file.relative_to(_PACKAGES)).encode() + b"\0")
                digest.update(file.read_bytes())
    return digest.hexdigest()[:32]
