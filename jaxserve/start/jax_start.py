"""Start of JAX's device: a card that is there and not used is named with the reason.

JAX itself falls back to the CPU where the plugin of a card does not fit, does not start or is not
there, with a log line at best.
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
from jaxserve.settings.config import cards_are_hidden
from jaxserve.settings.installation import install_command
from pallas_kernels.devices import DeviceLimits, target_device

_log = logging.getLogger(__name__)

# By build of JAX, the newest first; scripts/find_device.py, which runs before anything is
# installed, says where they are from.
OLDEST_DRIVERS = {"cuda13": 580, "cuda12": 525}
OLDEST_CARDS = {"cuda13": (7, 5), "cuda12": (7, 0)}
DRIVER_FILE = "proc/driver/nvidia/version"
# What a driver gives a process to reach its cards by: on Linux, and in WSL2.
CARD_FILES = ("dev/nvidiactl", "usr/lib/wsl/lib/libcuda.so.1")
_JAX_LOGGER = "jax._src.xla_bridge"
_VERSION = re.compile(r"NVRM version:.*?\s(\d+)\.\d")
_MOST_QUOTED = 300


@dataclass(frozen=True)
class CudaParts:
    """The parts of CUDA that this machine has.

    Attributes:
        has_driver: a driver is loaded.
        reaches_cards: and this process reaches its cards.
        driver: major version, where the driver gives it (not in WSL2).
        plugins: versions of JAX's plugins, by build.
        jaxlib: the version that plugins must have.
    """

    has_driver: bool
    reaches_cards: bool
    driver: int | None
    plugins: dict[str, str]
    jaxlib: str


def start_jax(root: Path = Path("/")) -> str:
    """Start JAX; return "cpu" or "gpu", which is any other device.

    Where a card is there and JAX runs on the CPU, log one warning with the reason and the remedy,
    unless JAX_PLATFORMS or CUDA_VISIBLE_DEVICES says that the CPU is meant.

    Args:
        root: of the files by which a driver is found.

    Raises:
        DeviceError: a plugin ends JAX's start, or was not built for this card.
    """
    with _heard() as records:
        try:
            is_cpu = jax.default_backend() == "cpu"
        except Exception as error:  # of any plugin: whatever it is, its user gets a sentence
            text = _one_line(error) or f"there is no device of JAX_PLATFORMS={_platforms()}"
            parts = find_parts(root)
            more = f"; {problem}; {remedy(parts)}" if (problem := problems(parts)) else ""
            raise DeviceError(f"JAX cannot start its device: {text}{more}") from error
    if is_cpu:
        # Whoever has chosen the CPU need not hear of plugins.
        warning = None if _cpu_is_chosen() else why_cpu(root, records)
    else:
        warning = check_card(target_device(), find_parts(root))
    if warning:
        _log.warning("%s", warning)
    elif not _cpu_is_chosen():
        _replay(records)
    return "cpu" if is_cpu else "gpu"


def find_parts(root: Path) -> CudaParts:
    """Look for a driver, the way to its cards, and plugins."""
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
        plugins={build: found for build in OLDEST_DRIVERS if (found := _version(_plugin(build)))},
        jaxlib=_version("jaxlib") or "",
    )


def why_cpu(root: Path, records: list[logging.LogRecord]) -> str | None:
    """Explain why JAX does not use a card; None where nothing speaks for one.

    Args:
        root: see `start_jax`.
        records: what JAX logged as it started.
    """
    files = (DRIVER_FILE, *CARD_FILES)
    # JAX has imported the package of all plugins, if there are any.
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
    """Return a warning where JAX uses a card through a plugin of another version.

    Raises:
        DeviceError: the only build was not made for the card: its compiler would crash.
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
    """Say what keeps JAX from a card as far as versions and files show it; "" for nothing."""
    driver = parts.driver
    if driver is not None and driver < OLDEST_DRIVERS["cuda12"]:
        return _old_driver(driver, "cuda12")
    found = _misfits(parts)
    if not parts.plugins and parts.has_driver:
        found.append("no CUDA plugin of JAX is installed")
    for build in parts.plugins:
        if driver is not None and driver < OLDEST_DRIVERS[build]:
            found.append(_old_driver(driver, build))
    if len(parts.plugins) > 1 and not found:
        names = " and ".join(map(_plugin, parts.plugins))
        found.append(f"{names} keep each other from starting")
    if parts.has_driver and not parts.reaches_cards:
        found.append("no card can be reached (a container starts with --gpus all)")
    return "; ".join(found)


def remedy(parts: CudaParts) -> str:
    """Say what to do about `problems`."""
    driver = parts.driver
    if driver is not None and driver < OLDEST_DRIVERS["cuda12"]:
        return f"install driver {OLDEST_DRIVERS['cuda13']} or newer"
    is_new = driver is not None and driver >= OLDEST_DRIVERS["cuda13"]
    return _pip("cuda13" if is_new else "cuda12", parts)


def plugin_remedy(parts: CudaParts) -> str | None:
    """Say how to get a plugin that compiles for cards which are not there; None where one is."""
    misfits = _misfits(parts)
    if len(misfits) < len(parts.plugins):
        return None
    return f"{'; '.join(misfits) or 'it is not installed'}; {_pip('cuda13', parts)}"


def _misfits(parts: CudaParts) -> list[str]:
    """Say which plugins JAX refuses: by the numbers that their versions begin with."""
    return [
        f"{_plugin(build)} {version} does not fit jaxlib {parts.jaxlib}"
        for build, version in parts.plugins.items()
        if _numbers(version) != _numbers(parts.jaxlib)
    ]


def _pip(build: str, parts: CudaParts) -> str:
    """Say how to get a build, and that it has to be the only one."""
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
    """Hold back what JAX logs as it starts: tracebacks, where a plugin fails.

    Why a plugin found no card is logged at a level that is off by default.
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
    """Choose what is nearest to the cause: an exception, CUDA's own failure, then any warning."""
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
