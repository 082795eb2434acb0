"""Plugin of pytest, in vLLM's own environment: their tests' server is `jaxserve serve`.

Their files are not edited. In their class that starts a server, the plugin replaces the steps that
start vLLM, fetch its weights and wait for a GPU's memory. It writes each test's outcome as a line
of JSON. Its settings come in the variable `TOLD`, as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

TOLD = "VLLM_TESTS_TOLD"
SECONDS = 240.0  # of a server's start


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """Replace the class that starts a server, before a test file imports it."""
    # Imported here: the project's own environment has no vLLM.
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    # Their own parser reads their arguments, and asks for a device.
    platforms._current_platform = CpuPlatform()
    utils: Any = importlib.import_module("tests.utils")  # of vLLM's folder of tests

    utils.RemoteOpenAIServer._start_server = start_server
    utils.RemoteOpenAIServer._poll = raise_if_ended
    utils.RemoteOpenAIServer._pre_download_model = lambda *_: None
    utils.RemoteOpenAIServer._get_gpu_memory_used = lambda *_: None


def start_server(
    self: Any, model: str, vllm_serve_args: list[str], env_dict: dict[str, str] | None
) -> None:
    """Start our server in the place of theirs, with their arguments."""
    orders = json.loads(os.environ[TOLD])
    arguments = translate(vllm_serve_args, orders["without"], orders["longest"])
    if "--served-model-name" not in arguments:
        arguments += ["--served-model-name", model]
    if key := (env_dict or {}).get("VLLM_API_KEY"):
        arguments += ["--api-key", key]
    command = [*orders["command"], orders["model"], *arguments]
    # Open as long as the server writes, which ends with the process.
    self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
    self.proc = subprocess.Popen(
        command,
        cwd=orders["root"],
        env=orders["environment"] | (env_dict or {}),
        stdout=self.log,
        stderr=self.log,
        start_new_session=True,
    )


def raise_if_ended(self: Any) -> int | None:
    """Say with which words a server ended that should have come up."""
    status = self.proc.poll()
    if status:
        self.log.seek(0)
        lines = self.log.read().splitlines()
        raise RuntimeError(lines[-1] if lines else f"the server ended with {status}")
    return status


def translate(given: list[str], without: list[str], longest: int) -> list[str]:
    """Return the arguments that our server takes.

    Args:
        without: options that have no meaning here, left out with their values.
        longest: the most tokens that the model takes. A longer `--max-model-len` becomes this.
    """
    kept: list[str] = []
    name, drop = "", False
    for word in given:
        if word.startswith("--"):
            name = word.partition("=")[0]
            drop = name in without
        elif name == "--max-model-len":
            word = str(min(longest, int(word)))
        if not drop:
            kept.append(word)
    return kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Write how each phase of a test ended, except set-up and tear-down that passed."""
    report = yield
    if report.when == "call" or not report.passed:
        write(item.nodeid, report.when, report.outcome, call.excinfo, report.duration)
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write why the tests of a file could not be collected."""
    if report.failed:
        lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
        row = {"test": report.nodeid, "when": "collect", "outcome": "failed"}
        _append(row | {"why": " ".join(line[1:].strip() for line in lines[-2:])[:500]})


def write(
    test: str,
    when: str,
    outcome: str,
    raised: pytest.ExceptionInfo[BaseException] | None,
    seconds: float,
) -> None:
    """Append one line of JSON to the file of outcomes."""
    why = "" if raised is None else f"{raised.typename}: {raised.value}"
    where = "" if raised is None else f"{raised.traceback[-1].lineno + 1}"
    row = {"test": test, "when": when, "outcome": outcome, "why": why[:500], "line": where}
    _append(row | {"seconds": round(seconds, 2)})


def _append(row: dict[str, Any]) -> None:
    with Path(json.loads(os.environ[TOLD])["outcomes"]).open("a") as file:
        file.write(json.dumps(row) + "\n")
