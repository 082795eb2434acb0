"""Python environment that compiles for absent cards. It is made once, and kept.

It holds Python 3.12, jax 0.11.2 with its CUDA 13 plugin, and triton's wheel for its disassembler,
about 1 GB in all, and CUDA's assembler if the PATH has none.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pathlib
import shutil
import subprocess
import sys

from scripts.lib.paths import IN_CHECKOUT

JAX = "0.11.2"
PTXAS = "nvidia-cuda-nvcc==13.0.88"


class NoEnvironment(Exception):
    """Reason why there is no environment and it cannot be made."""


class NoPython(NoEnvironment):
    """Reason that no network cures."""


def default_folder() -> pathlib.Path:
    return pathlib.Path.home() / ".cache/jaxserve/offline"


def find_python() -> str:
    """Find a Python 3.12 to make the environment with.

    Raises:
        NoPython: there is no Python 3.12.
    """
    if sys.version_info[:2] == (3, 12):
        return sys.executable
    # A version manager may put a name without a Python on the PATH. It keeps its Pythons beside
    # each other.
    kept = pathlib.Path(sys.base_prefix).parent
    found = [shutil.which("python3.12"), *map(str, sorted(kept.glob("3.12*/bin/python")))]
    for python in filter(None, found):
        if subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    raise NoPython("no python3.12 on the PATH; name one with --python")


def make_environment(folder: pathlib.Path, python: str | None = None) -> pathlib.Path:
    """Create the environment if it is not there. Return its interpreter.

    Raises:
        NoEnvironment: there is no Python 3.12, or the packages cannot be had.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        interpreter, done = folder / "bin/python", folder / "complete"
        if not done.is_file() or done.read_text() != JAX:
            print(f"making {folder} (about 1 GB)", file=sys.stderr)
            _run(python or find_python(), "-m", "venv", str(folder))
            plugins = (f"jax-cuda13-pjrt=={JAX}", f"jax-cuda13-plugin=={JAX}")
            _install(interpreter, f"jax=={JAX}", "flax", "jaxtyping")
            _install(interpreter, "--no-deps", *plugins, "triton==3.6.0")
            done.write_text(JAX)
        if _find_ptxas(folder) is None:
            _install(interpreter, "--no-deps", PTXAS)
        return interpreter


def open_environment(arguments: argparse.Namespace) -> pathlib.Path:
    """Return the interpreter of the environment that `--env` and `--python` name, or end."""
    try:
        return make_environment(arguments.env, getattr(arguments, "python", None))
    except NoEnvironment as error:
        raise SystemExit(str(error)) from error


def add_environment(parser: argparse.ArgumentParser) -> None:
    """Add the option `--env`."""
    folder, text = default_folder(), "environment to use or make"
    parser.add_argument("--env", type=pathlib.Path, default=folder, help=text)


def with_ptxas(folder: pathlib.Path) -> dict[str, str]:
    """Return variables with which CUDA's assembler is found by its name.

    Raises:
        NoEnvironment: there is no assembler.
    """
    found = _find_ptxas(folder)
    if found is None:
        raise NoEnvironment("ptxas is neither on the PATH nor in the environment")
    return {"PATH": f"{found.parent}{os.pathsep}{os.environ['PATH']}"}


def compiler_variables(
    folder: pathlib.Path, work: pathlib.Path, *, whole_constants: bool = False
) -> dict[str, str]:
    """Return the variables of a process that compiles, and leaves dumps in a folder.

    Args:
        work: where XLA's and Mosaic's dumps go, to "xla" and "mosaic" below it.
        whole_constants: dump constants of more than a few numbers too.

    Raises:
        NoEnvironment: there is no assembler.
    """
    (work / "mosaic").mkdir(exist_ok=True)
    flags = [f"--xla_dump_to={work}/xla", "--xla_dump_hlo_as_text"]
    # Dumping everything the emitters make, not only PTX, takes ten times as long.
    flags.append("--xla_dump_emitter_re=ptx")
    flags += ["--xla_dump_large_constants=true"] if whole_constants else []
    return {
        # No settings of JAX's own: programs from its cache would leave no dumps.
        **{name: value for name, value in os.environ.items() if not name.startswith("JAX_")},
        **with_ptxas(folder),
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": " ".join(flags),
        "MOSAIC_GPU_DUMP_TO": f"{work}/mosaic",
        **IN_CHECKOUT,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONWARNINGS": "ignore",
    }


def _find_ptxas(folder: pathlib.Path) -> pathlib.Path | None:
    found = shutil.which("ptxas")
    packaged = [pathlib.Path(found)] if found else []
    packaged += folder.glob("lib/python*/site-packages/nvidia/cu13/bin/ptxas")
    return next(iter(packaged), None)


def _install(interpreter: pathlib.Path, *packages: str) -> None:
    _run(str(interpreter), "-m", "pip", "install", "-q", *packages)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as error:
        raise NoEnvironment(f"{' '.join(command[:4])} ...: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        why = (error.stderr.strip() or "no reason given").splitlines()[-1]
        raise NoEnvironment(f"{' '.join(command[:4])} ...: {why}") from error
