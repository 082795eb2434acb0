"""The two commands' installations and devices, under a simulated driver, disk and pip."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import find_device, try_cuda

ROOT = Path(__file__).parent.parent
UUID = "GPU-6a6b1c4e-0c2f-4d0e-9b5e-2f8d1c3a4b5c"
H100 = f"580.65.06, 9.0, {UUID}, NVIDIA H100 80GB HBM3"
# Variables that would choose the device before the driver is asked.
CHOOSING = ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")


def play(folder: Path, name: str, text: str) -> None:
    """Put a shell script first on the PATH that `folder` is first on."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder first on PATH, with a driver that reports no device."""
    for name in CHOOSING:
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "played"
    play(folder, "nvidia-smi", "exit 9")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return folder


def cards(*rows: str) -> str:
    return "\n".join(f"echo '{row}'" for row in rows)


def card(driver: str, capability: str, number: int = 0) -> str:
    return f"{driver}, {capability}, GPU-{number}, Card {number}"


@pytest.mark.parametrize(
    ("driver", "build"),
    [
        ("595.45.04", "cuda13"),
        ("580.65.06", "cuda13"),
        ("575.57.08", "cuda12"),
        ("570.86.10", "cuda12"),
        ("535.183.01", "cuda12"),
        ("525.60.13", "cuda12"),
        ("515.43.04", "cpu"),
    ],
)
def test_the_driver_chooses_the_build(played: Path, driver: str, build: str) -> None:
    play(played, "nvidia-smi", cards(card(driver, "9.0")))
    choice = find_device.find()
    number = driver.split(".")[0]
    why = f"driver {number} is too old; CUDA 12 needs 525 or newer"
    assert choice.build == build
    assert choice.why == (why if build == "cpu" else f"Card 0 (9.0), driver {number}")


@pytest.mark.parametrize(
    ("driver", "capability", "build"),
    [
        ("595.45.04", "12.0", "cuda13"),
        ("595.45.04", "8.0", "cuda13"),
        ("595.45.04", "7.5", "cuda13"),
        ("580.65.06", "7.0", "cuda12"),  # CUDA 13 was not built for Volta
        ("580.65.06", "7.2", "cuda12"),
        ("550.54.15", "7.5", "cuda12"),
        ("550.54.15", "7.0", "cuda12"),
        ("580.65.06", "6.1", "cpu"),
        ("550.54.15", "5.2", "cpu"),
    ],
)
def test_an_old_card_takes_the_build_that_still_has_it(
    played: Path, driver: str, capability: str, build: str
) -> None:
    play(played, "nvidia-smi", cards(card(driver, capability)))
    choice = find_device.find()
    assert choice.build == build
    needed = f"compute capability 7.0 or newer is needed; Card 0 has {capability}"
    used = f"Card 0 ({capability}), driver {driver[:3]}"
    assert choice.why == (needed if build == "cpu" else used)


def test_of_several_cards_those_are_used_that_can_be(
    played: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = [card("595.45.04", cap, i) for i, cap in enumerate(("7.0", "8.6", "[N/A]", "12.0"))]
    play(played, "nvidia-smi", cards(*mixed))
    choice = find_device.find()
    assert (choice.build, choice.cards) == ("cuda13", "GPU-1,GPU-3")
    assert choice.why == "Card 1 (8.6), Card 3 (12.0), driver 595"
    play(played, "nvidia-smi", cards(mixed[1], mixed[3]))
    assert find_device.find().cards == ""
    play(played, "nvidia-smi", cards(card("550.54.15", "7.0"), card("550.54.15", "6.1", 1)))
    assert find_device.find() == find_device.Choice("cuda12", "GPU-0", "Card 0 (7.0), driver 550")
    play(played, "nvidia-smi", cards(*mixed))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert find_device.find().cards == ""  # the user has chosen a card


def test_drivers_that_do_not_know_capabilities_are_named_by_their_version(played: Path) -> None:
    known = "[[ $1 == --query-gpu=driver_version ]] && echo 470.256.02 && exit"
    refused = "echo 'Field \"compute_cap\" is not a valid field to query.'; exit 2"
    play(played, "nvidia-smi", f"{known}\n{refused}")
    assert find_device.find().why == "driver 470 is too old; CUDA 12 needs 525 or newer"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'could not talk to the driver'; exit 9", "failed with status 9: could not talk to"),
        ("exit 1", "nvidia-smi failed with status 1"),
        ("true", "nvidia-smi lists no card"),
        ("echo No devices were found", "answers 'No devices were found', not a driver and a card"),
        ("printf '\\xff\\x00\\x1b[31m, 9.0'", "not a driver and a card"),
        ("echo '[N/A], [N/A], [N/A], [N/A]'", "not a driver and a card"),
        ("kill -SEGV $$", "nvidia-smi failed with status -11"),
    ],
)
def test_a_driver_that_fails_or_talks_nonsense_is_quoted(
    played: Path, script: str, why: str
) -> None:
    play(played, "nvidia-smi", script)
    choice = find_device.find()
    assert (choice.build, choice.cards) == ("cpu", "")
    assert why in choice.why


def test_a_driver_that_hangs_is_given_up(played: Path) -> None:
    play(played, "nvidia-smi", "sleep 1000")
    assert find_device.find(0.2).why == "nvidia-smi did not answer within 0.2 s"


def test_without_a_driver_there_is_cpu(played: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (played / "nvidia-smi").unlink()
    monkeypatch.setenv("PATH", str(played))
    assert find_device.find().why == "there is no nvidia-smi, so no NVIDIA driver"
    play(played, "nvidia-smi", "")
    (played / "nvidia-smi").write_bytes(b"\x7fELF not for this machine")
    assert find_device.find().why.startswith("nvidia-smi cannot be run: ")


@pytest.mark.parametrize(
    ("name", "value", "build"),
    [
        ("JAX_PLATFORMS", "cpu", "cpu"),
        ("JAX_PLATFORMS", "cuda,cpu", "cuda13"),
        ("JAX_PLATFORMS", "", "cuda13"),
        ("CUDA_VISIBLE_DEVICES", "", "cpu"),
        ("CUDA_VISIBLE_DEVICES", "-1", "cpu"),
        ("CUDA_VISIBLE_DEVICES", "0", "cuda13"),
    ],
)
def test_the_user_can_choose_cpu(
    played: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, build: str
) -> None:
    play(played, "nvidia-smi", cards(H100))
    monkeypatch.setenv(name, value)
    choice = find_device.find()
    assert choice.build == build
    assert (name in choice.why) == (build == "cpu")


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "ppc64le")])
def test_there_are_no_wheels_for_other_machines(
    played: Path, monkeypatch: pytest.MonkeyPatch, system: str, machine: str
) -> None:
    play(played, "nvidia-smi", cards(H100))
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert find_device.find().why == f"there is no JAX with CUDA for {system} on {machine}"


# ------------------------------------------------------------------- installed packages


class Copy:
    """A checkout's commands over a stub of pip, which prints its arguments.

    Args:
        folder: an empty one.
        played: first on PATH.
    """

    def __init__(self, folder: Path, played: Path) -> None:
        self.folder, self.played = folder, played
        (folder / "scripts").mkdir(parents=True)
        for name in ("scripts/bootstrap", "scripts/find_device.py", "pyproject.toml"):
            (folder / name).write_bytes((ROOT / name).read_bytes())
        self.try_cuda("print('NVIDIA H100'); sys.exit(0)")
        self.pip("true")
        self.free(50)

    def pip(self, then: str) -> None:
        ours = f'[[ $1 == -m && $2 != scripts.* ]] || exec {sys.executable} "$@"'
        text = f'{ours}\nprintf "%s\\n" "${{*:3}}"\n{then}'
        play(self.folder / ".venv/bin", "python", text)

    def try_cuda(self, program: str) -> None:
        (self.folder / "scripts/try_cuda.py").write_text(f"import os, sys\n{program}\n")

    def free(self, gigabytes: float) -> None:
        free = int(gigabytes * 1e9 / 1024)
        play(self.played, "df", f"printf 'Filesystem 1024-blocks Used Available\\n/ 1 1 {free}\\n'")

    def plugin(self, build: str) -> Path:
        plugin = self.folder / f".venv/lib/python3.11/site-packages/jax_plugins/xla_{build}"
        plugin.mkdir(parents=True, exist_ok=True)
        return plugin

    def run(self, command: str) -> tuple[list[str], list[str]]:
        """Run a command; return the lines of stdout, without pip's options, and of stderr."""
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"source scripts/bootstrap; {command}"],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        quiet = result.stdout.replace(" -qq --no-compile", " -qq")
        quiet = quiet.replace(" -qq --editable", "").replace(" -qq", "")
        return quiet.splitlines(), result.stderr.splitlines()


@pytest.fixture
def copy(tmp_path: Path, played: Path) -> Copy:
    play(played, "nvidia-smi", cards(H100))
    return Copy(tmp_path / "copy", played)


TELL = 'start_device; echo "${JAX_PLATFORMS-} ${CUDA_VISIBLE_DEVICES-}"'


def test_the_build_of_the_driver_is_installed_and_started(copy: Copy) -> None:
    out, err = copy.run(f'install ""; {TELL}')
    assert out == ["install .[cuda13]", " "]
    why = "NVIDIA H100 80GB HBM3 (9.0), driver 580"
    assert err[1:] == [
        f"with JAX for CUDA (several GB): {why}",
        f"Runs on NVIDIA H100, with JAX for CUDA 13 ({why}).",
    ]
    assert copy.run("install_for_tests")[0] == ["install torch==2.13.0", "install .[test,cuda13]"]
    assert copy.run('install ""; install_for_tests') == ([], [])


def test_a_machine_without_a_gpu_installs_for_cpu_until_it_gains_one(copy: Copy) -> None:
    play(copy.played, "nvidia-smi", "exit 9")
    out, err = copy.run(f'install ""; {TELL}')
    assert out == ["install .", "cpu "]
    assert err[-1] == "Runs on cpu: nvidia-smi failed with status 9."
    assert copy.run('install ""') == ([], [])
    play(copy.played, "nvidia-smi", cards(H100))
    assert copy.run('install ""')[0] == ["install .[cuda13]"]
    # Tests that can run on a GPU also run on CPU.
    play(copy.played, "nvidia-smi", "exit 9")
    out, err = copy.run(f'install ""; {TELL}')
    assert out == ["cpu "]


def test_python_3_11_gets_the_versions_of_the_tests(copy: Copy) -> None:
    play(copy.played, "nvidia-smi", "exit 9")
    copy.run('install ""')
    versions = copy.folder / "scripts/constraints.txt"
    versions.write_bytes((ROOT / "scripts/constraints.txt").read_bytes())
    is_pair = sys.version_info[:2] == (3, 11)
    # New versions are installed over older ones, once.
    options = " -c scripts/constraints.txt --editable" if is_pair else ""
    assert copy.run('install ""')[0] == [f"install{options} ."]
    assert copy.run('install ""')[0] == []
    versions.write_text("")
    assert len(copy.run('install ""')[0]) == 1


def test_the_versions_of_the_tests_are_exact_and_allowed() -> None:
    lines = (ROOT / "scripts/constraints.txt").read_text().splitlines()[1:]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    exact = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in (*project["dependencies"], *project["optional-dependencies"]["test"]):
        needed = Requirement(line)
        if needed.name != "jaxserve":
            assert needed.specifier.contains(exact[canonicalize_name(needed.name)]), line


def test_a_new_driver_changes_the_build_and_removes_the_other(copy: Copy) -> None:
    play(copy.played, "nvidia-smi", cards(card("570.86.10", "12.0")))
    assert copy.run('install ""; install test')[0] == [
        "install .[cuda12]",
        "install .[test,cuda12]",
    ]
    plugin = copy.plugin("cuda12")
    play(copy.played, "nvidia-smi", cards(card("595.45.04", "12.0")))
    out, _ = copy.run('install ""')
    assert out == ["uninstall --yes jax-cuda12-plugin jax-cuda12-pjrt", "install .[cuda13]"]
    # The removal also took the tests' packages.
    plugin.rmdir()
    play(copy.played, "nvidia-smi", cards(card("570.86.10", "12.0")))
    assert copy.run("install test")[0] == ["install .[test,cuda12]"]


@pytest.mark.parametrize(("driver", "need"), [("580.65.06", 10), ("570.86.10", 12)])
def test_a_full_disk_gets_the_build_for_cpu(copy: Copy, driver: str, need: int) -> None:
    play(copy.played, "nvidia-smi", cards(card(driver, "9.0")))
    copy.free(need - 0.5)
    out, err = copy.run(f'install ""; {TELL}')
    assert out == ["install .", "cpu "]
    assert err[-1] == (
        f"Runs on cpu: JAX for CUDA needs {need} GB of the disk, of which {need - 1} GB are free "
        f"(Card 0 (9.0), driver {driver[:3]})."
    )
    out, err = copy.run(f'install ""; {TELL}')
    assert (out, len(err)) == (["cpu "], 1)
    copy.free(need + 0.5)
    assert copy.run('install ""')[0] == [f"install .[cuda{need + 3 if need == 10 else 12}]"]


def test_a_disk_that_cuda_itself_filled_is_not_full(copy: Copy) -> None:
    copy.run('install ""')
    copy.plugin("cuda13")
    copy.free(1)
    assert copy.run('install ""; install test')[0] == ["install .[test,cuda13]"]


def test_cuda_that_pip_cannot_install_leaves_cpu(copy: Copy) -> None:
    copy.pip("[[ $* != *cuda* ]]")
    out, err = copy.run(f'install ""; {TELL}')
    assert out == ["install .[cuda13]", "install .", "cpu "]
    assert err[-1] == "Runs on cpu: JAX for CUDA could not be installed."


@pytest.mark.parametrize("program", ["print('no device'); sys.exit(1)", "os.kill(os.getpid(), 11)"])
def test_cuda_that_does_not_start_leaves_cpu(copy: Copy, program: str) -> None:
    copy.try_cuda(program)
    out, err = copy.run(f"export JAX_PLATFORMS=cuda; install ''; {TELL}")
    assert out == ["install .[cuda13]", "cpu "]
    reason = "no device" if "print" in program else "it crashed or took longer than three minutes"
    assert err[-1] == f"Runs on cpu: CUDA does not start: {reason}."


def test_only_cards_that_can_be_used_are_seen(copy: Copy) -> None:
    copy.try_cuda("print(os.environ['CUDA_VISIBLE_DEVICES'])")
    play(copy.played, "nvidia-smi", cards(card("595.45.04", "6.1"), card("595.45.04", "7.5", 1)))
    out, err = copy.run(f'install ""; {TELL}')
    assert out == ["install .[cuda13]", " GPU-1"]
    assert err[-1] == "Runs on GPU-1, with JAX for CUDA 13 (Card 1 (7.5), driver 595)."


def test_the_demo_starts_what_was_installed(copy: Copy) -> None:
    (copy.folder / "scripts/demo").write_bytes((ROOT / "scripts/demo").read_bytes())
    (copy.folder / "scripts/__init__.py").touch()
    (copy.folder / "scripts/live_demo.py").write_text(
        "import os, sys; print(sys.argv[1:], os.environ.get('JAX_PLATFORMS'))"
    )
    assert copy.run("exec bash scripts/demo --no-live")[0][1:] == ["['--no-live'] None"]
    copy.try_cuda("sys.exit(1)")
    assert copy.run("exec bash scripts/demo --no-live")[0] == ["['--no-live'] cpu"]


@pytest.mark.parametrize("starts", [True, False])
def test_the_suite_runs_on_cpu_and_tests_of_a_gpu_by_themselves(copy: Copy, starts: bool) -> None:
    (copy.folder / "scripts/test").write_bytes((ROOT / "scripts/test").read_bytes())
    for stage in ("check", "clients"):
        play(copy.folder / "scripts", stage, f"echo {stage}")
    copy.run("install_for_tests")
    # The modules print the paths that their tests need besides .venv.
    copy.pip(
        '[[ $2 != tests.support.weekly ]] || exec echo "clients"\necho "on ${JAX_PLATFORMS-all}"'
    )
    if not starts:
        copy.try_cuda("sys.exit(1)")
    out, err = copy.run("exec bash scripts/test")
    gpu = ["-n 0 tests/gpu", "on all"]
    # Clients are installed while it checks, if a selected test uses them.
    assert sorted(out[:2]) == ["check", "clients"]
    assert out[2:] == ["-n 2 --since day", "on cpu", *(gpu if starts else [])]
    assert err[-1].startswith("Runs on NVIDIA H100, " if starts else "Runs on cpu: CUDA does not ")


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ("-k a", "-k a"),
        ("--changed", "--changed HEAD~1"),
        ("--changed main", "--changed main"),
        ("--changed -x", "--changed HEAD~1 -x"),
        ("--since main -k a", "--since main -k a"),
        ("--long", "--long"),
    ],
)
def test_arguments_of_the_suite_go_to_pytest(copy: Copy, given: str, passed: str) -> None:
    (copy.folder / "scripts/test").write_bytes((ROOT / "scripts/test").read_bytes())
    play(copy.folder / "scripts", "check", "echo check")
    copy.run("install_for_tests")
    copy.pip("true")
    out, _ = copy.run(f"exec bash scripts/test {given}")
    assert f"-n 2 {passed}" in out


# ------------------------------------------------------------------- CUDA's start


PLUGIN = """
from jax._src import hardware_utils, xla_bridge

def fail():
    raise RuntimeError("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:\\n  no luck")

def initialize():
    hardware_utils.has_visible_nvidia_gpu = lambda: True
    {body}
"""
REGISTER = "xla_bridge.register_backend_factory('cuda', fail, priority=200, fail_quietly=False)"


@pytest.mark.parametrize("body", ["fail()", REGISTER])
def test_jax_with_a_plugin_that_fails_names_the_reason(tmp_path: Path, body: str) -> None:
    """One that fails while it is loaded is logged by JAX, one that finds no device raises."""
    plugin = tmp_path / "jax_plugins/xla_played"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(PLUGIN.format(body=body))
    code, reason = start_cuda(PYTHONPATH=str(tmp_path))
    assert code == 1
    assert "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: no luck" in reason


def test_jax_for_cpu_is_no_start_of_cuda() -> None:
    code, reason = start_cuda(CUDA_VISIBLE_DEVICES="")
    assert code == 1
    assert "gpu" in reason


def start_cuda(**variables: str) -> tuple[int, str]:
    environment = {name: value for name, value in os.environ.items() if name not in CHOOSING}
    result = subprocess.run(
        [sys.executable, try_cuda.__file__],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    [line] = result.stdout.splitlines()
    return result.returncode, line


# ------------------------------------------------------------------- the tests' platform


PLATFORM_TEST = """
import os
def test_platform(): assert os.environ.get("JAX_PLATFORMS") == {expected!r}
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "cpu"),
        ("tests/weights", "cpu"),
        ("tests/gpu/test_x.py", "cuda"),
        ("tests/gpu tests/weights", "cpu"),
        ("-n 2 tests/weights", "cpu"),
        ("-n 2 tests/gpu", "cuda"),
        ("-m gpu", "cuda"),
    ],
)
def test_tests_run_on_cpu_but_for_those_of_a_gpu(
    tmp_path: Path, arguments: str, expected: str
) -> None:
    for folder in ("tests/support", "scripts/lib"):  # imported by tests/conftest.py
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for folder in ("gpu", "weights"):
        (tmp_path / "tests" / folder).mkdir()
    for folder in ("gpu", "weights"):
        mark = "import pytest\npytestmark = pytest.mark.gpu\n" if folder == "gpu" else ""
        test = tmp_path / "tests" / folder / f"test_{'x' if folder == 'gpu' else 'y'}.py"
        test.write_text(mark + PLATFORM_TEST.format(expected=expected))
    for name in ("tests/conftest.py", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments.split()],
        cwd=tmp_path,
        env=os.environ | {"JAX_PLATFORMS": "cuda"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
