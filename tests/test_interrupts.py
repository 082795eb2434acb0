"""Ctrl-C at any moment ends a command with status 130 and without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.start.interrupts import INTERRUPTED, on_signal, run_interruptible
from tests.support.kept_programs import users_environment

ROOT = Path(__file__).parent.parent
# A module that is interrupted while it is imported.
MODULE = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nx = [i for i in range(9)]\n"
LATE = """
import sys
from jaxserve.start.interrupts import run_interruptible
class Late:
    def __del__(self):
        import os, signal
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(9): pass
def command():
    late = Late()
    del late
    for _ in range(9): pass
    print("goes on")
    return 0
sys.exit(run_interruptible(command))
"""


@pytest.fixture(autouse=True)
def own_handler() -> Iterator[None]:
    before, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    # A child inherits an ignored signal, as pytest may have been started with it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    sys.unraisablehook = hook


def test_an_interrupt_waits_for_the_import_that_it_meets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "interrupted_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)

    def interrupt() -> None:
        raise KeyboardInterrupt

    on_signal(signal.SIGINT, interrupt)
    lines = []

    def load() -> None:
        import interrupted_module  # type: ignore[import-not-found] # noqa: F401

        lines.append("after the import")

    with pytest.raises(KeyboardInterrupt):
        load()
    assert lines == [] and sys.modules["interrupted_module"].x[-1] == 8


def test_an_interrupt_outside_imports_acts_at_once() -> None:
    came = []
    on_signal(signal.SIGINT, lambda: came.append(1))
    os.kill(os.getpid(), signal.SIGINT)
    assert came == [1]


def test_an_interrupt_in_a_finalizer_ends_the_command() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "")


def test_an_ignored_interrupt_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handlers = []
    assert run_interruptible(lambda: handlers.append(signal.getsignal(signal.SIGINT)) or 3) == 3
    assert handlers == [signal.SIG_IGN]


def test_an_interrupt_behind_a_command_changes_no_status() -> None:
    assert run_interruptible(lambda: 3) == 3
    os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def start(words: list[str], *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *options, "-m", "jaxserve", *words],
        cwd=ROOT,
        env=users_environment() | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def check(status: int, said: str) -> None:
    assert status in (INTERRUPTED, 0), (status, said)
    assert "Traceback" not in said and "Error" not in said, said
    if "loading" not in said:  # the command was interrupted in its imports
        assert status == 0 or said.count("\n") <= 1, said


def commands(folder: Path) -> list[list[str]]:
    return [
        ["serve", "--port", "0"],
        ["generate", "hi"],
        ["convert", "jaxserve/demo_model", str(folder / "converted")],
    ]


@pytest.mark.parametrize("module", ["argparse", "jaxserve.settings.config", "jax._src.config"])
def test_a_command_is_interrupted_in_its_imports(module: str, tmp_path: Path) -> None:
    for words in commands(tmp_path):
        with start(words, "-X", "importtime") as process:
            assert process.stderr is not None
            for line in process.stderr:
                if line.split()[-1] == module:  # it has just been imported
                    process.send_signal(signal.SIGINT)
                    break
            rest = [line for line in process.stderr if not line.startswith("import time:")]
        check(process.returncode, "".join(rest))
        assert process.returncode == INTERRUPTED
        assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("tenths", range(2, 31))
def test_a_command_is_interrupted_at_any_moment(tenths: int, tmp_path: Path) -> None:
    """On a quiet machine, where Python itself has started after 0.2 s."""
    for words in commands(tmp_path):
        process = start(words)
        time.sleep(tenths / 10)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
        check(process.returncode, said)
        assert {path.name for path in tmp_path.iterdir()} <= {"converted"}
