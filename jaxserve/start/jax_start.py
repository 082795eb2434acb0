"""Start of JAX on its device, with a warning that says why an installed card is not used.

JAX falls back to the CPU if the plugin for a card is missing, has the wrong version or fails. It
logs at most one line about that.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import jax

from jaxserve.errors import DeviceError
from jaxserve.settings.environment import cards_are_hidden
from jaxserve.settings.installation import install_command
from pallas_kernels.devices import DeviceLimits, target_device

_log = logging.getLogger(__name__)

# For each build of JAX, the newest first. The sources are in scripts/find_device.py, which runs
# before packages are installed.
OLDEST_DRIVERS = {"cuda13": 580, "cuda12": 525}
OLDEST_CARDS = {"cuda13": (7, 5), "cuda12": (7, 0)}
DRIVER_FILE = "proc/driver/nvidia/version"
# Files by which a process reaches its cards through the driver, on Linux and in WSL2.
CARD_FILES = ("dev/nvidiactl", "usr/lib/wsl/lib/libcuda.so.1")
_JAX_LOGGER = "jax._src.xla_bridge"
_VERSION = re.compile(r"NVRM version:.*?\s(\d+)\.\d")
_MOST_QUOTED = 300


@dataclass(frozen=True)
class CudaParts:
    """The driver, cards and CUDA plugins of JAX that were found on this machine.

    Attributes:
        has_driver: whether a driver is loaded.
        reaches_cards: whether this process reaches the driver's cards.
        driver: major version of the driver, or None if unknown (as in WSL2).
        plugins: versions of the installed CUDA plugins of JAX, by build ("cuda12", "cuda13").
        jaxlib: version of jaxlib, which plugins must have too.
    """

    has_driver: bool
    reaches_cards: bool
    driver: int | None
    plugins: dict[str, str]
    jaxlib: str


def start_jax(root: Path = Path("/")) -> str:
    """Start JAX, and return its platform: "cpu", or "gpu" for every other device.

    If the machine has a card and JAX runs on the CPU, log one warning with the reason and the
    remedy, unless JAX_PLATFORMS or CUDA_VISIBLE_DEVICES selects the CPU.

    Args:
        root: root of the file system with the files that show whether a driver is installed.

    Raises:
        DeviceError: JAX or a plugin fails to start, or the plugin was not built for this card.
    """
    with _heard() as records:
        try:
            is_cpu = jax.default_backend() == "cpu"
        except Exception as error:  # a plugin may raise any exception
            text = _one_line(error) or f"there is no device of JAX_PLATFORMS={_platforms()}"
            parts = find_parts(root)
            more = f"; {problem}; {remedy(parts)}" if (problem := problems(parts)) else ""
            raise DeviceError(f"JAX cannot start its device: {text}{more}") from error
    if is_cpu:
        # A user who has selected the CPU needs no warning about plugins.
        warning = None if _cpu_is_chosen() else why_cpu(root, records)
    else:
        warning = check_card(target_device(), find_parts(root))
    if warning:
        _log.warning("%s", warning)
    elif not _cpu_is_chosen():
        _replay(records)
    return "cpu" if is_cpu else "gpu"


def find_parts(root: Path) -> CudaParts:
    """Return the parts of CUDA on this machine, from files below `root` and package versions."""
    reaches_cards = any((root / name).exists() for name in CARD_FILES)
    try:
        text = (root / DRIVER_FILE).read_text()
    except OSError:
        text = None
    version = _VERSION.search(text or "")
    return CudaParts(
        has_driver=reaches_cards or text is not None,
        reaches_cards=reaches_cards,
        driver=int(version[1]) if version else None,
        plugins={
            build: installed for build in OLDEST_DRIVERS if (installed := _version(_plugin(build)))
        },
        jaxlib=_version("jaxlib") or "",
    )


def why_cpu(root: Path, records: list[logging.LogRecord]) -> str | None:
    """Return a warning that explains why JAX runs on the CPU, or None without a sign of a card.

    Args:
        root: see `start_jax`.
        records: log records of JAX's start, which may contain the reason.
    """
    files = (DRIVER_FILE, *CARD_FILES)
    # JAX has imported the package `jax_plugins` if a plugin is installed.
    if "jax_plugins" not in sys.modules and not any((root / name).exists() for name in files):
        return None
    parts = find_parts(root)
    if not parts.has_driver:
        if not parts.plugins:
            return None
        names = " and ".join(map(_plugin, parts.plugins))
        return (
            f"{names} is installed, but there is no NVIDIA driver, so JAX runs on the CPU; in a "
            "notebook choose a runtime with a GPU, and set JAX_PLATFORMS=cpu if the CPU is meant"
        )
    reason = problems(parts)
    more = f"; {remedy(parts)}" if reason else ""
    if not reason:
        reason = _heard_reason(records)
    return (
        f"this machine has an NVIDIA card, but JAX runs on the CPU: {reason}{more}; set "
        "JAX_PLATFORMS=cpu if the CPU is meant"
    )


def check_card(device: DeviceLimits, parts: CudaParts) -> str | None:
    """Return a warning if the version of JAX's CUDA plugin differs from jaxlib's, else None.

    Args:
        device: the device that JAX has opened.
        parts: the parts of CUDA on this machine.

    Raises:
        DeviceError: the card is older than the only installed plugin supports, whose compiler would
            crash.
    """
    if not device.is_gpu:
        return None
    for build in parts.plugins if len(parts.plugins) == 1 else ():
        if device.capability < OLDEST_CARDS[build]:
            least = ".".join(map(str, OLDEST_CARDS[build]))
            is_served = device.capability >= OLDEST_CARDS["cuda12"]
            cure = _pip("cuda12", parts) if is_served else "set JAX_PLATFORMS=cpu"
            raise DeviceError(
                f"{device} is too old for {_cuda(build)}, which needs {least}; {cure}"
            )
    misfits = _misfits(parts)
    return f"{device}: {'; '.join(misfits)}; {remedy(parts)}" if misfits else None


def problems(parts: CudaParts) -> str:
    """Return as text the reasons why JAX cannot use a card, by versions and files. "" if none."""
    driver = parts.driver
    if driver is not None and driver < OLDEST_DRIVERS["cuda12"]:
        return _old_driver(driver, "cuda12")
    reasons = _misfits(parts)
    if not parts.plugins and parts.has_driver:
        reasons.append("no CUDA plugin of JAX is installed")
    for build in parts.plugins:
        if driver is not None and driver < OLDEST_DRIVERS[build]:
            reasons.append(_old_driver(driver, build))
    if len(parts.plugins) > 1 and not reasons:
        names = " and ".join(map(_plugin, parts.plugins))
        reasons.append(f"{names} keep each other from starting")
    if parts.has_driver and not parts.reaches_cards:
        reasons.append("no card can be reached (a container starts with --gpus all)")
    return "; ".join(reasons)


def remedy(parts: CudaParts) -> str:
    """Return an instruction that solves `problems`: install a driver, or a CUDA build of JAX."""
    driver = parts.driver
    if driver is not None and driver < OLDEST_DRIVERS["cuda12"]:
        return f"install driver {OLDEST_DRIVERS['cuda13']} or newer"
    is_new = driver is not None and driver >= OLDEST_DRIVERS["cuda13"]
    return _pip("cuda13" if is_new else "cuda12", parts)


def plugin_remedy(parts: CudaParts) -> str | None:
    """Return how to install a CUDA plugin for compilation without a card, None if one is usable."""
    misfits = _misfits(parts)
    if len(misfits) < len(parts.plugins):
        return None
    return f"{'; '.join(misfits) or 'it is not installed'}; {_pip('cuda13', parts)}"


def _misfits(parts: CudaParts) -> list[str]:
    # JAX refuses a plugin if the leading numbers of its version differ from jaxlib's.
    return [
        f"{_plugin(build)} {version} does not fit jaxlib {parts.jaxlib}"
        for build, version in parts.plugins.items()
        if _numbers(version) != _numbers(parts.jaxlib)
    ]


def _pip(build: str, parts: CudaParts) -> str:
    # Plugins of two builds keep each other from starting, so that the others are removed.
    others = [name for name in parts.plugins if name != build]
    packages = [f"jax-{other}-{half}" for other in others for half in ("plugin", "pjrt")]
    remove = f"`pip uninstall -y {' '.join(packages)}` and " if packages else ""
    return (
        f"run {remove}`{install_command(build)}` and start again, in a notebook after a restart "
        "of its runtime"
    )


def _old_driver(driver: int, build: str) -> str:
    return f"driver {driver} is too old for {_cuda(build)}, which needs {OLDEST_DRIVERS[build]}"


def _cuda(build: str) -> str:
    return build.replace("cuda", "CUDA ")


def _plugin(build: str) -> str:
    return f"jax-{build}-plugin"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> list[str]:
    return re.findall(r"\d+", re.split(r"[^\d.]", version)[0])


def _platforms() -> str:
    return str(getattr(jax.config, "jax_platforms", None) or "")


def _cpu_is_chosen() -> bool:
    return "cpu" in _platforms().split(",") or cards_are_hidden()


@contextmanager
def _heard() -> Generator[list[logging.LogRecord]]:
    """Return a context that collects JAX's log records of level INFO and above in a list.

    The records are not printed. They include tracebacks of failing plugins. A plugin that finds no
    card gives the reason at level INFO, which is off by default.
    """
    records: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        records.append(record)
        return False

    logger = logging.getLogger(_JAX_LOGGER)
    level = logger.level
    logger.addFilter(hold)
    logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))
    try:
        yield records
    finally:
        logger.setLevel(level)
        logger.removeFilter(hold)


def _replay(records: list[logging.LogRecord]) -> None:
    logger = logging.getLogger(_JAX_LOGGER)
    for record in records:
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


def _heard_reason(records: list[logging.LogRecord]) -> str:
    # In the order of closeness to the cause: an exception, the failure of CUDA, any warning.
    errors = [record.exc_info[1] for record in records if record.exc_info]
    texts = [record.getMessage() for record in records]
    failures = [text for text in texts if "backend 'cuda'" in text]
    warned = [
        text
        for text, record in zip(texts, records, strict=True)
        if record.levelno >= logging.WARNING
    ]
    return _one_line(next(iter([*errors, *failures, *warned]), "JAX gives no reason"))


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:_MOST_QUOTED]
