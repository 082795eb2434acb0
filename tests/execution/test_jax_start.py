"""JAX's device: a driver or a plugin that does not fit is a sentence, never silence or a trace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jaxlib
import pytest

from jaxserve.errors import DeviceError
from jaxserve.start import jax_start
from jaxserve.start.jax_start import CudaParts, check_card, problems, remedy
from pallas_kernels.devices import DeviceLimits, find_card
from scripts import find_device

ROOT = Path(__file__).parent.parent.parent
OWN = jaxlib.__version__
NVRM = "NVRM version: NVIDIA UNIX {}  {}  Release Build"
PIP = "run `pip install -e '.[cuda12]'` and start again, in a notebook after a restart of its"
MEANT = "set JAX_PLATFORMS=cpu if the CPU is meant\n"
# This machine's /dev lacks the files that JAX looks for, and a folder simulates the driver's files.
SEEN = "from jax._src import hardware_utils; hardware_utils.has_visible_nvidia_gpu = lambda: True\n"
START = """
from pathlib import Path
from jaxserve.start.jax_start import start_jax
print(start_jax(Path({root!r})))
"""
REGISTER = """
from jax._src import hardware_utils, xla_bridge

def fail():
    raise RuntimeError("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:\\n  no luck")

def initialize():
    hardware_utils.has_visible_nvidia_gpu = lambda: True
    xla_bridge.register_backend_factory("cuda", fail, priority=200, fail_quietly={quietly})
"""
RAISE = "def initialize():\n    raise OSError('libcudart.so:\\n cannot be opened')\n"


def play_machine(root: Path, driver: str | None, has_card: bool = True) -> Path:
    """Make the files of a driver, and of its cards, below a folder."""
    root.mkdir(exist_ok=True)
    if driver is not None:
        version = root / "proc/driver/nvidia/version"
        version.parent.mkdir(parents=True)
        version.write_text(NVRM.format("x86_64 Kernel Module", driver))
    if has_card:
        (root / "dev").mkdir()
        (root / "dev/nvidiactl").touch()
    return root


def play_plugin(folder: Path, build: str, version: str, body: str = "initialize = int") -> None:
    """Write a distribution with the names that JAX's plugin has, to be put on PYTHONPATH."""
    about = folder / f"jax_{build}_plugin-{version}.dist-info"
    about.mkdir(parents=True)
    name = f"Name: jax-{build}-plugin\nVersion: {version}\n"
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\n{name}")
    module = folder / f"jax_plugins/xla_{build}"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text(body)


def run(arguments: list[str], plugins: Path, **variables: str) -> tuple[int, str, str]:
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    environment |= {"PYTHONPATH": f"{ROOT}:{plugins}", "CUDA_VISIBLE_DEVICES": "0"} | variables
    result = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode, result.stdout, result.stderr


def start(root: Path, plugins: Path, seen: str = SEEN, **variables: str) -> tuple[str, str]:
    code, out, err = run(["-c", seen + START.format(root=str(root))], plugins, **variables)
    assert code == 0, err
    return out.strip(), err


def test_a_stale_plugin_is_named_with_both_versions_and_the_way_out(tmp_path: Path) -> None:
    play_plugin(tmp_path / "plugins", "cuda12", "0.7.2")
    root = play_machine(tmp_path / "root", "550.54.15")
    platform, said = start(root, tmp_path / "plugins")
    assert platform == "cpu"
    assert said == (
        "this machine has an NVIDIA card, but JAX runs on the CPU: jax-cuda12-plugin 0.7.2 does "
        f"not fit jaxlib {OWN}; {PIP} runtime; {MEANT}"
    )
    # A user who selects the CPU gets no message.
    assert start(root, tmp_path / "plugins", JAX_PLATFORMS="cpu") == ("cpu", "")
    assert start(root, tmp_path / "plugins", CUDA_VISIBLE_DEVICES="") == ("cpu", "")


def test_a_card_without_a_plugin_is_named(tmp_path: Path) -> None:
    platform, said = start(play_machine(tmp_path / "root", "550.54.15"), tmp_path / "plugins")
    assert platform == "cpu"
    assert f"runs on the CPU: no CUDA plugin of JAX is installed; {PIP}" in said
    assert said.count("\n") == 1


def test_a_machine_without_a_card_has_nothing_to_say(tmp_path: Path) -> None:
    root = play_machine(tmp_path / "root", None, has_card=False)
    assert start(root, tmp_path / "plugins", seen="") == ("cpu", "")


def test_a_plugin_without_a_driver_is_named(tmp_path: Path) -> None:
    play_plugin(tmp_path / "plugins", "cuda12", OWN)
    root = play_machine(tmp_path / "root", None, has_card=False)
    platform, said = start(root, tmp_path / "plugins", seen="")
    assert platform == "cpu"
    assert said == (
        "jax-cuda12-plugin is installed, but there is no NVIDIA driver, so JAX runs on the CPU; "
        f"in a notebook choose a runtime with a GPU, and {MEANT}"
    )


def test_a_plugin_whose_start_is_logged_by_jax_is_quoted_in_a_line(tmp_path: Path) -> None:
    play_plugin(tmp_path / "plugins", "cuda12", OWN, RAISE)
    root = play_machine(tmp_path / "root", "550.54.15")
    platform, said = start(root, tmp_path / "plugins")
    assert platform == "cpu"
    assert said == (
        "this machine has an NVIDIA card, but JAX runs on the CPU: libcudart.so: cannot be opened; "
        + MEANT
    )
    play_plugin(tmp_path / "quiet", "cuda12", OWN, REGISTER.format(quietly=True))
    said = start(root, tmp_path / "quiet")[1]
    assert (
        "Unable to initialize backend 'cuda': CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: no luck" in said
        and said.count("\n") == 1
    )


def test_jax_has_its_own_say_where_no_sentence_of_ours_takes_its_place(tmp_path: Path) -> None:
    play_plugin(tmp_path / "plugins", "else", "1.0", RAISE)
    root = play_machine(tmp_path / "root", None, has_card=False)
    said = start(root, tmp_path / "plugins", seen="")[1]
    assert "Traceback" in said and "libcudart.so" in said and "backend 'tpu'" not in said
    assert start(root, tmp_path / "plugins", seen="", JAX_PLATFORMS="cpu")[1] == ""
    # At the level that its user has set.
    play_plugin(tmp_path / "quiet", "else", "1.0", REGISTER.format(quietly=True))
    said = start(root, tmp_path / "quiet", seen="import logging; logging.basicConfig()\n")[1]
    assert "Falling back to cpu" in said and "no luck" not in said


BROKEN = {
    "registered": (REGISTER.format(quietly=False), "SYSTEM_DRIVER_MISMATCH: no luck"),
    "not a module": ("import ctypes; ctypes.CDLL('libno.so')", "libno.so: cannot open shared"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_plugin_that_ends_the_start_ends_the_command_in_a_sentence(
    tmp_path: Path, kind: str
) -> None:
    body, reason = BROKEN[kind]
    play_plugin(tmp_path, "cuda12", "0.7.2", body)
    code, out, err = run(["-m", "jaxserve", "serve", "--port", "0"], tmp_path)
    last = err.splitlines()[-1]
    assert (code, out) == (2, "")
    assert last.startswith("jaxserve: error: JAX cannot start its device: ") and reason in last
    assert f"jax-cuda12-plugin 0.7.2 does not fit jaxlib {OWN}; {PIP}" in last
    assert "Traceback" not in err


def test_a_platform_that_is_not_there_ends_in_a_sentence(tmp_path: Path) -> None:
    arguments = ["-m", "jaxserve", "generate", "hi"]
    code, _, err = run(arguments, tmp_path, JAX_PLATFORMS="cuda")
    assert code == 2
    assert err.splitlines()[-1].startswith("jaxserve: error: JAX cannot start its device: ")
    assert "Traceback" not in err


# ------------------------------------------------------------------- messages and their subjects


def parts(driver: int | None = 550, reaches: bool = True, **plugins: str) -> CudaParts:
    return CudaParts(True, reaches, driver, plugins, OWN)


@pytest.mark.parametrize(
    ("have", "said", "done"),
    [
        (parts(470), "driver 470 is too old for CUDA 12, which needs 525", "install driver 580"),
        (
            parts(550, cuda13=OWN),
            "driver 550 is too old for CUDA 13, which needs 580",
            "run `pip uninstall -y jax-cuda13-plugin jax-cuda13-pjrt` and `pip install "
            "-e '.[cuda12]'`",
        ),
        # `pip install -e '.[cuda13]'` beside the packages of a notebook.
        (
            parts(580, cuda13=OWN, cuda12="0.7.2"),
            f"jax-cuda12-plugin 0.7.2 does not fit jaxlib {OWN}",
            "run `pip uninstall -y jax-cuda12-plugin jax-cuda12-pjrt` and `pip install "
            "-e '.[cuda13]'`",
        ),
        (
            parts(580, cuda13=OWN, cuda12=OWN),
            "jax-cuda13-plugin and jax-cuda12-plugin keep each other from starting",
            "run `pip uninstall -y jax-cuda12-plugin",
        ),
        (parts(None), "no CUDA plugin of JAX is installed", "run `pip install -e '.[cuda12]'`"),
        (parts(580), "no CUDA plugin of JAX is installed", "run `pip install -e '.[cuda13]'`"),
        (
            parts(580, False, cuda13=OWN),
            "no card can be reached (a container starts with --gpus all)",
            "",
        ),
        (parts(580, cuda13=f"{OWN}.dev1+local"), "", ""),
    ],
)
def test_problems_and_remedies(have: CudaParts, said: str, done: str) -> None:
    assert problems(have) == said
    assert remedy(have).startswith(done)


@pytest.mark.parametrize(
    ("kind", "driver"), [("Kernel Module", 550), ("Open Kernel Module for x86_64", 570)]
)
def test_both_kinds_of_driver_say_their_version(tmp_path: Path, kind: str, driver: int) -> None:
    root = play_machine(tmp_path / "root", "0.0", has_card=False)
    (root / "proc/driver/nvidia/version").write_text(NVRM.format(kind, f"{driver}.86.10"))
    found = jax_start.find_parts(root)
    assert (found.driver, found.has_driver, found.reaches_cards) == (driver, True, False)


def test_a_card_that_a_build_was_not_made_for_is_refused_before_the_compiler_crashes() -> None:
    volta, turing = find_card("V100").limits, find_card("T4").limits
    with pytest.raises(DeviceError, match=r"V100.*too old for CUDA 13.*uninstall.*cuda12"):
        check_card(volta, parts(580, cuda13=OWN))
    assert check_card(volta, parts(580, cuda12=OWN)) is None
    pascal = DeviceLimits("gpu", "Tesla P100-PCIE-16GB", (6, 0), 56)
    with pytest.raises(DeviceError, match=r"P100.*too old for CUDA 12.*7\.0; set JAX_PLATFORMS"):
        check_card(pascal, parts(580, cuda12=OWN))
    assert check_card(turing, parts(580, cuda13=OWN)) is None


def test_a_card_used_through_a_plugin_of_another_version_is_named() -> None:
    said = check_card(find_card("T4").limits, parts(550, cuda12="0.7.2")) or ""
    assert f"jax-cuda12-plugin 0.7.2 does not fit jaxlib {OWN}; {PIP}" in said


def test_the_engine_and_the_installer_agree_on_drivers_and_cards() -> None:
    assert jax_start.OLDEST_DRIVERS == find_device.OLDEST_DRIVERS
    assert jax_start.OLDEST_CARDS == find_device.OLDEST_CARDS
