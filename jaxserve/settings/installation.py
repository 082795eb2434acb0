"""The installation: a report of it for `jaxserve collect-env`, and commands that extend it."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import jaxserve
from jaxserve.settings.cards import driver_cards, driver_version
from jaxserve.settings.config import cpu_threads
from jaxserve.settings.environment import (
    card_to_open,
    has_cuda_plugin,
    own_variables,
    user_cache_dir,
)
from jaxserve.settings.machine import host_memory

_CHECKOUT = Path(__file__).parent.parent.parent
GIB = 2**30
PACKAGES = """
    jax jaxlib jax-cuda13-plugin jax-cuda12-plugin nvidia-cublas flax numpy ml_dtypes llvmlite
    transformers tokenizers huggingface-hub safetensors gguf orbax-checkpoint llguidance starlette
    uvicorn h11 msgspec prometheus-client python-multipart httpx2 opentelemetry-sdk torch pip
""".split()


def install_command(extra: str = "", checkout: Path = _CHECKOUT) -> str:
    """Return the `pip install` command that adds an extra to this installation of jaxserve.

    The project is not on the package index, where its name belongs to another project: a command
    names a checkout or a wheel file.

    Args:
        extra: an extra of pyproject.toml, or "" for the package alone.
        checkout: the folder that contains the package. The command names it if it has a
            pyproject.toml.
    """
    is_checkout = (checkout / "pyproject.toml").is_file()
    project, option = (".", "-e ") if is_checkout else ("PATH_OF_WHEEL", "")
    return f"pip install {option}" + (f"'{project}[{extra}]'" if extra else project)


def collect_environment(root: Path = Path("/")) -> dict[str, str]:
    """Return facts about the machine and the installation by name, as texts without secrets.

    No card is opened and no package is imported.

    Args:
        root: root of the file system with /proc and /sys. Tests pass another one.
    """
    return {
        "jaxserve": f"{jaxserve.__version__}, {Path(jaxserve.__file__).parent}",
        "python": f"{platform.python_version()} ({platform.python_implementation()}), "
        f"{sys.executable}",
        "os": f"{_system(root)}, {platform.platform()}",
        "libc": " ".join(platform.libc_ver()) or "unknown",
        "cpu": _cpu(root),
        "cores": _cores(root),
        "memory": _memory(root),
        "driver": driver_version() or "none",
        "cards": "; ".join(_cards()) or "none",
        "device": _device(),
        "programs": _cache(),
        "packages": ", ".join(f"{name} {version}" for name, version in _packages()),
        "environment": " ".join(f"{name}={value}" for name, value in own_variables().items())
        or "nothing set",
    }


def _system(root: Path) -> str:
    text = _read(root / "etc/os-release")
    named = [line.partition("=")[2] for line in text.splitlines() if line.startswith("PRETTY_NAME")]
    return named[0].strip('"') if named else platform.system()


def _cpu(root: Path) -> str:
    fields: dict[str, str] = {}  # of the first core
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    extensions = [name for name in ("avx2", "avx512f", "amx_bf16", "asimd", "sve") if name in flags]
    name = fields.get("model name") or platform.processor() or platform.machine()
    return f"{name} ({' '.join([platform.machine(), *extensions])})"


def _cores(root: Path) -> str:
    text = f"{cpu_threads()} of {os.cpu_count()}"
    quota = _read(root / "sys/fs/cgroup/cpu.max").split()  # version 2: quota and period, in us
    if len(quota) != 2:
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quota = [_read(root / "sys/fs/cgroup/cpu" / name).strip() for name in files]
    if all(part.isdigit() for part in quota) and int(quota[1]):
        return f"{text}, of which the control group allows {int(quota[0]) / int(quota[1]):g}"
    return f"{text}, no limit by a control group"


def _memory(root: Path) -> str:
    total, available = host_memory(root)
    text = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    host = [line.split() for line in _read(root / "proc/meminfo").splitlines()]
    installed = next((int(line[1]) << 10 for line in host if line[:1] == ["MemTotal:"]), total)
    if total < installed:
        return f"{text}, limited by a control group; the machine has {installed / GIB:.1f}"
    return f"{text}, no limit by a control group"


def _cards() -> list[str]:
    return [
        f"{card.name} ({'.'.join(map(str, card.capability))}), {card.free / GIB:.1f} of "
        f"{card.total / GIB:.1f} GiB free"
        for card in driver_cards()
    ]


def _device() -> str:
    if not has_cuda_plugin():
        return "cpu; JAX is installed without CUDA"
    card = card_to_open()
    return "cpu" if card is None else card.card.name


def _cache() -> str:
    folder = user_cache_dir()
    if folder is None:
        return "not kept: the user has no home"
    try:
        files = [path.stat() for path in (folder / "programs").rglob("*") if path.is_file()]
    except OSError as error:
        return f"{folder}: {error.strerror}"
    size = sum(file.st_size for file in files)
    return f"{folder / 'programs'}: {len(files)} files, {size / GIB:.2f} GiB"


def _packages() -> list[tuple[str, str]]:
    versions = []
    for name in PACKAGES:
        try:
            versions.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return versions


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
