# pyright: reportUnknownMemberType=false
"""Files kept from one start to the next: compiled programs, and XLA's choices for a GPU."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxserve.execution.mesh import spec_of
from jaxserve.execution.typed_jax import devices
from jaxserve.models import ModelConfig
from jaxserve.settings.config import EngineConfig, compiler_settings, cpu_threads
from jaxserve.start.plan.sum_options import sum_options
from jaxserve.start.programs.autotuning import lay_down
from jaxserve.start.programs.described_card import DescribedCard
from jaxserve.start.programs.kept_files import make_private
from jaxserve.start.programs.programs import ProgramStore
from pallas_kernels.devices import target_device

_log = logging.getLogger(__name__)
_PACKAGES = Path(__file__).parent.parent.parent.parent
# The files that programs are traced from.
_SOURCES = (
    *("pallas_kernels", "jaxserve/execution", "jaxserve/models", "jaxserve/weights"),
    *("jaxserve/start/programs/compiler.py", "jaxserve/request.py"),
    *(f"jaxserve/scheduling/{name}.py" for name in ("slot_table", "row_settings")),
)
# Settings that no program depends on beyond what its name and its arguments' shapes say.
_NOT_COMPILED = (
    *("model", "tokenizer", "skip_tokenizer_init", "load_format", "seed"),
    "chat_template_content_format",
    *("gpu_memory_utilization", "kv_cache_memory_bytes", "memory_share"),
    *("num_gpu_blocks_override", "enable_prefix_caching", "scheduling_policy"),
    *("async_scheduling", "long_prefill_token_threshold", "compilation_cache_dir"),
    *("check_invariants", "wait_for_all_programs", "profile_start"),
    *("prefix_caching_secret", "kv_events_config"),
    *("master_addr", "master_port", "nodes_secret"),
    *("max_logprobs", "logprobs_mode"),
    # What they change is the model's configuration, or max_model_len.
    *("hf_overrides", "language_model_only", "allow_long_max_model_len", "eplb_config"),
)


def prepare_cache(directory: Path) -> Path | None:
    """Make ready what JAX keeps by itself; the folder for compiled programs, or None for none.

    On a GPU, XLA keeps what it measured to choose its kernels, beside what comes with this package.
    JAX couples that to its own cache of programs, which is left empty: see ProgramStore. Where the
    user has set that cache up, it stays, and takes the place of ours.
    """
    kept = getattr(jax.config, "jax_compilation_cache_dir", None)
    autotuning = directory / "autotuning"
    if kept not in (None, str(autotuning)):
        _log.info("compiled programs are left to JAX's own cache in %s", kept)
        return None
    device = target_device()
    if kept is None and device.is_gpu:
        keep_choices(device.kind, autotuning)
    return directory / "programs"


def keep_choices(kind: str, autotuning: Path) -> None:
    """Give XLA a folder for what it measures on a card of this kind, with what we have of it."""
    try:
        make_private(autotuning)
    except OSError as error:
        _log.warning("autotuning results are not kept: %s", error)
        return
    lay_down(kind, autotuning)
    jax.config.update("jax_compilation_cache_dir", str(autotuning))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)


def open_store(
    directory: Path | None,
    config: EngineConfig,
    model_config: ModelConfig,
    leaves: list[jax.Array],
    card: DescribedCard | None = None,
) -> ProgramStore:
    """Open the store of the programs of an engine's earlier starts.

    Args:
        directory: where programs are kept, or None.
        config: resolved.
        model_config: of the model.
        leaves: its arrays, or their shapes.
        card: that the programs are for, if it is not JAX's device.

    Raises:
        InvalidRequest: see `sum_options`.
    """
    settings = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in (*_NOT_COMPILED, "decode_sizes", "token_sizes")
    }
    what: dict[str, Any] = {
        "settings": repr(sorted(settings.items())),
        "model": repr(model_config),
        "leaves": [f"{leaf.dtype}{list(leaf.shape)}{_division(leaf)}" for leaf in leaves],
        "asked_sizes": [config.decode_sizes, config.token_sizes],
        "device": devices()[0].device_kind if card is None else card.card.name,
        # Programs of a card leave its host nothing to do that depends on it.
        "threads": cpu_threads() if card is None and devices()[0].platform == "cpu" else 0,
    }
    number = model_config.split.devices
    options = sum_options(config, target_device() if card is None else card.card.limits)
    return ProgramStore(directory, what, fingerprint(card), card is None, number, options)


def _division(leaf: jax.Array) -> str:
    """Say how an array is divided over devices, if it is."""
    spec = spec_of(leaf)
    return f" {spec}" if any(spec) else ""


def fingerprint(card: DescribedCard | None = None) -> dict[str, Any]:
    """Return what compiled programs depend on besides settings: versions, machine, source.

    Args:
        card: that is not there; of its machine only the card itself is known.
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


def _cpu_features() -> str:
    """Return the machine's architecture and a digest of its instruction sets."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("flags", "Features", "model name", "CPU part")
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    found = [f"{key.strip()}:{value}" for key, value in lines.items() if key.strip() in names]
    return f"{platform.machine()} {hashlib.sha256(repr(sorted(found)).encode()).hexdigest()[:16]}"


def _source_digest() -> str:
    digest = hashlib.sha256()
    for source in _SOURCES:
        path = _PACKAGES / source
        if not path.exists():  # it would leave the digest, and later edits would not count
            raise FileNotFoundError(f"programs are traced from {path}, which is not there")
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.suffix in (".py", ".json"):
                digest.update(str(file.relative_to(_PACKAGES)).encode() + b"\0")
                digest.update(file.read_bytes())
    return digest.hexdigest()[:32]
