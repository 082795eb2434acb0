"""Start a server with an API key, and define the answers that each client must receive."""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

import pytest

from scripts.lib.paths import ROOT
from scripts.lib.server_process import Server, ask
from tests.support.kept_programs import in_users_environment

KEY = "a-client-key"
MODEL = "demo_model"
APART = ROOT / ".venv-clients" / "bin"
ARGUMENTS = (
    "--max-num-seqs 8 --max-num-batched-tokens 128 --decode-sizes 8 --token-sizes 128 "
    f"--max-num-queued-reqs 8 --api-key {KEY} --enable-auto-tool-choice --tool-call-parser hermes"
).split()
QUESTION, ANSWER = "Reverse: s-t-o-n-e", "e-n-o-t-s"


@pytest.fixture(scope="package")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    files = str(tmp_path_factory.mktemp("files"))
    with ExitStack() as stack:
        with in_users_environment():
            server = stack.enter_context(Server(*ARGUMENTS, "--files-dir", files))
        yield server


def canary(server: Server) -> list[int]:
    """Return the token ids of a greedy answer."""
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    answer = ask(server.url + "/v1/completions", body, {"authorization": f"Bearer {KEY}"})
    return answer["choices"][0]["token_ids"]


@pytest.fixture(scope="package")
def first(running: Server) -> list[int]:
    return canary(running)


@pytest.fixture
def url(running: Server, first: list[int]) -> Iterator[str]:
    """Yield the server's address without /v1, and check its answers again after each test."""
    yield running.url
    assert canary(running) == first, running.log()


@cache
def ensure_clients() -> None:
    """Make the clients' own environment if `scripts/test` has not made it."""
    with (ROOT / "scripts/clients").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run([ROOT / "scripts/clients"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


Program = Callable[..., "subprocess.CompletedProcess[str]"]


def run_apart(
    home: Path, program: str, *arguments: str, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program of the clients' own environment, which must succeed."""
    ensure_clients()
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(home),
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_API_KEY": KEY,
    }
    result = subprocess.run(
        [str(APART / program), *arguments],
        cwd=folder or Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-4000:]
    return result


@pytest.fixture
def apart(tmp_path: Path) -> Program:
    """Return a function that runs a program in the clients' environment and fails if it fails."""
    return partial(run_apart, tmp_path)
