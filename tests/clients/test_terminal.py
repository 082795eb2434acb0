"""`jaxserve chat` and `jaxserve complete`, as a user runs them."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from urllib.request import Request, urlopen

import pytest

from scripts.lib.paths import ROOT
from scripts.lib.server_process import ask
from tests.clients.conftest import ANSWER, KEY, MODEL, QUESTION

HEADERS = {"authorization": f"Bearer {KEY}"}


def command(name: str, url: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "jaxserve", name, "--url", url, *arguments]


def run(name: str, url: str, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
    result = subprocess.run(
        command(name, url, "--api-key", KEY, *arguments),
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return result.returncode, result.stdout, result.stderr


def metric(url: str, name: str) -> float:
    with urlopen(Request(url + "/metrics", headers=HEADERS)) as answer:
        found = re.search(rf"^jaxserve:{name}{{.*}} (.*)$", answer.read().decode(), re.MULTILINE)
    assert found, name
    return float(found.group(1))


def test_one_message(url: str) -> None:
    for one in (url, url + "/v1", url + "/v1/"):
        assert run("chat", one, "-q", QUESTION) == (0, ANSWER + "\n", "")
    code, out, err = run("chat", url, "--model-name", MODEL, "-q", QUESTION, "--stats")
    assert (code, out) == (0, ANSWER + "\n")
    assert re.fullmatch(r"\[10 tokens; the first after [\d.]+ s, \d+ tokens/s after it\]\n", err)


def test_a_conversation_remembers(url: str) -> None:
    before = metric(url, "prompt_tokens_total")
    code, out, err = run("chat", url, "--system-prompt", "Hm.", stdin=f"{QUESTION}\n\n{QUESTION}\n")
    assert (code, err) == (0, "") and out.startswith(ANSWER + "\n")
    messages = [{"role": "system", "content": "Hm."}, {"role": "user", "content": QUESTION}]
    counted = metric(url, "prompt_tokens_total") - before
    turns = [messages, [*messages, {"role": "assistant", "content": ANSWER}, messages[1]]]
    expected = [ask(url + "/tokenize", {"messages": turn}, HEADERS)["count"] for turn in turns]
    assert counted == sum(expected)


def test_completions(url: str) -> None:
    body = {"prompt": "Hello", "max_tokens": 5}
    text = ask(url + "/v1/completions", body, HEADERS)["choices"][0]["text"]
    assert run("complete", url, "--max-tokens", "5", "-q", "Hello") == (0, text + "\n", "")
    code, out, _ = run("complete", url, "--max-tokens", "5", stdin="Hello\nHello\n")
    assert (code, out) == (0, 2 * (text + "\n"))


BAD: dict[str, tuple[list[str], str]] = {
    "model": (["--model-name", "nope", "-q", "x"], "404: The model `nope` does not exist."),
    "field": (["--temperature", "-1", "-q", "x"], "400: temperature must be"),
    "key": (["--api-key", "no", "-q", "x"], "401: a valid API key is needed"),
    "server": (["--url", "http://127.0.0.1:1", "-q", "x"], "cannot reach http://127.0.0.1:1"),
    "address": (["--url", "gopher://x", "-q", "x"], "cannot reach gopher://x"),
    "port": (["--url", "http://x:y", "-q", "x"], "'http://x:y' is no URL"),
    "lines": (["--temperature", "-1"], "400: temperature must be"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_goes_wrong_is_one_line(url: str, case: str) -> None:
    arguments, message = BAD[case]
    code, out, err = run("chat", url, *arguments, stdin="x\n")
    assert (code, out) == (1, "")
    assert err.startswith("jaxserve: error: ") and message in err and err.count("\n") == 1, err


# In the child, before the command: the terminal is its own, and Ctrl-C has its usual meaning in a
# shell (a program started in the background ignores interrupts, and its children inherit that).
# This is a separate program, since a function between fork and exec would fork this process with
# JAX in it.
TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Screen:
    """A terminal with a program on it."""

    def __init__(self, *words: str) -> None:
        self._side, end = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *words],
            cwd=ROOT,
            stdin=end,
            stdout=end,
            stderr=end,
            env=os.environ | {"TERM": "dumb", "INPUTRC": "/dev/null"},
            start_new_session=True,
        )
        os.close(end)
        self.text = ""

    def type(self, keys: str) -> None:
        os.write(self._side, keys.encode())

    def until(self, pattern: str, seconds: float = 30) -> str:
        """Return the output since the last call, up to a pattern."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text, re.DOTALL)):
            assert time.monotonic() < end, self.text
            self.text += os.read(self._side, 65536).decode(errors="replace")
        shown, self.text = self.text[: found.end()], self.text[found.end() :]
        return shown

    def close(self) -> int:
        """Return the exit status; the output that was not read before is in `text`."""
        try:
            while data := os.read(self._side, 65536):
                self.text += data.decode(errors="replace")
        except OSError:  # how Linux says that the program has ended
            pass
        os.close(self._side)
        return self.process.wait(30)


def test_keys_stop_an_answer_and_end(url: str) -> None:
    arguments = ("--api-key", KEY, "--max-tokens", "1000", "--temperature", "0")
    screen = Screen(*command("complete", url, *arguments))
    screen.until("> ")
    screen.type("Hello\n")
    screen.until("hat hat hat")
    screen.type("\x03")
    shown = screen.until(r"\n> ")
    assert shown.count("hat") < 900
    end = time.monotonic() + 10
    while metric(url, "num_requests_running"):
        assert time.monotonic() < end, "the server goes on with an answer that was stopped"
    screen.type("half a line\x03")
    screen.until(r"\(Ctrl-D ends\)")
    screen.until("> ")
    screen.type("\x04")
    assert screen.close() == 0


def test_an_answer_cannot_drive_the_terminal(url: str) -> None:
    arguments = ("--max-tokens", "500", "--temperature", "90", "-q", "x")
    controls = "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
    # Nearly uniform over all bytes, but the end may come early.
    raw = shown = ""
    while len(raw) < 1000:
        raw += run("complete", url, *arguments)[1]
    while len(shown) < 1000:
        screen = Screen(*command("complete", url, "--api-key", KEY, *arguments))
        assert screen.close() == 0
        shown += screen.text
    assert re.search(controls, raw) and not re.search(controls, shown)
