"""An environment of its own for each engine, made on first use in the user's cache folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from jaxserve.settings.environment import user_cache_dir
from scripts.compare.engine import Engine


def cache_folder() -> Path:
    """Return the folder of environments, checkpoints and conversions."""
    base = user_cache_dir()
    return Path.cwd() / ".compare" if base is None else base / "engines"


class NotInstalled(Exception):
    """An engine that cannot be had here, with the reason."""


def python_of(engine: Engine, given: dict[str, Path]) -> Path:
    """Find the interpreter that runs the engine. Install the engine unless that was done.

    Args:
        engine: the adapter.
        given: interpreters that have it installed already, by the engine's name.

    Raises:
        NotInstalled: with the last lines of the command that failed.
    """
    if engine.name in given:
        return given[engine.name]
    if not engine.requirements:
        return Path(sys.executable)
    # Engines of one set of packages share an environment.
    environment = cache_folder() / engine.name.removesuffix("-cb")
    python = environment / "bin" / "python"
    marker = environment / "installed"
    wanted = "\n".join(" ".join(call) for call in engine.requirements)
    try:
        if not (marker.exists() and marker.read_text() == wanted):
            _run([sys.executable, "-m", "venv", str(environment)])
            for call in engine.requirements:
                _run([str(python), "-m", "pip", "install", "--quiet", *call])
            marker.write_text(wanted)
        engine.after_install(environment)
    except (subprocess.CalledProcessError, OSError) as error:
        raise NotInstalled(_reason(error)) from error
    return python


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _reason(error: Exception) -> str:
    said = getattr(error, "stderr", None) or getattr(error, "output", None) or b""
    lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
    command = " ".join(Path(part).name for part in getattr(error, "cmd", [])[:4])
    return " ".join([command, *lines[-2:]]).strip() or f"{type(error).__name__}: {error}"


def versions(python: Path, packages: tuple[str, ...]) -> dict[str, str]:
    """Return installed versions by package. Packages that are not found are left out."""
    script = (
        "import importlib.metadata as m, sys\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(name, m.version(name))\n"
        "    except m.PackageNotFoundError: pass\n"
    )
    answer = subprocess.run(
        [str(python), "-c", script, *packages], capture_output=True, text=True, check=False
    )
    return dict(line.split(" ", 1) for line in answer.stdout.splitlines())
