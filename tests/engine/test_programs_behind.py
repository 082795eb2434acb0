"""Programs that are compiled behind the first answers: no request waits, and no token changes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoint import save_checkpoint
from tests.support.quick_code import compile_quickly


def command(action: str, checkpoint: Path, cache: Path) -> list[str]:
    module = "tests.engine.start_process"
    return [sys.executable, "-m", module, action, str(checkpoint), str(cache)]


@contextmanager
def process(action: str, checkpoint: Path, cache: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    compile_quickly(environment)
    with subprocess.Popen(
        command(action, checkpoint, cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as made:
        try:
            yield made
        finally:
            made.kill()


def run(action: str, checkpoint: Path, cache: Path) -> tuple[list[Any], str]:
    with process(action, checkpoint, cache) as made:
        out, error = made.communicate(timeout=600)
    assert made.returncode == 0, error
    return json.loads(out.splitlines()[-1]), error


@pytest.fixture(scope="module")
def expected(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Return a full cache, and answers before, with and without all programs."""
    cache = tmp_path_factory.mktemp("programs") / "cache"
    return cache, run("held_back", checkpoint, cache)[0]


def test_requests_are_served_while_a_compilation_is_held_back(
    expected: tuple[Path, list[Any]],
) -> None:
    first, before, last, after, read, from_files, all_waited_for = expected[1]
    assert first == last == from_files == all_waited_for
    assert before["waited"] == after["waited"] == read["waited"] == 0
    assert before["behind"] == 0 and before["missing"] > 3 and before["buckets"] == 1
    assert before["most_steps"] == 1 and after["most_steps"] == 16
    assert before["has_early"] and not after["has_early"]
    assert after["behind"] > 3 and after["missing"] == 0 and after["error"] is None
    assert after["buckets"] > 3 and read["buckets"] == 2
    assert read["behind"] == read["missing"] == 0


def test_programs_take_no_memory_until_they_are_used(
    checkpoint: Path, tmp_path: Path, expected: tuple[Path, list[Any]]
) -> None:
    cache = shutil.copytree(expected[0], tmp_path / "cache")  # most programs are there
    (unused, alone, pairs, facts), error = run("used_alone", checkpoint, cache)
    assert (unused, alone, pairs) == ([4], [1, 4], [1, 2, 4])
    assert "damaged" in error and facts["behind"] == 1
    assert facts["waited"] == 0 and facts["error"] is None


@pytest.fixture(scope="module")
def closed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, str]:
    """Return a cache with a start's programs and no background programs, and the engine's log."""
    cache = tmp_path_factory.mktemp("programs") / "cache"
    return cache, *run("closed_early", checkpoint, cache)


def test_an_engine_that_closes_leaves_no_process(closed: tuple[Path, Any, str]) -> None:
    _, (is_gone, missing), error = closed
    assert is_gone and missing == 3 and "Traceback" not in error


def test_an_engine_serves_on_where_the_process_that_compiles_is_killed(
    checkpoint: Path, closed: tuple[Path, Any, str], expected: tuple[Path, list[Any]]
) -> None:
    (answers, facts), error = run("killed_child", checkpoint, closed[0])
    assert answers == expected[1][0] and facts["waited"] == 0
    assert "ended (-9)" in facts["error"] and "serves without them" in error


def test_a_full_disk_leaves_a_start_that_works(
    checkpoint: Path, tmp_path: Path, expected: tuple[Path, list[Any]]
) -> None:
    (answers, facts), error = run("full_disk", checkpoint, tmp_path)
    assert answers == expected[1][0] and facts["waited"] == 0 and facts["behind"] == 0
    assert "a compiled program is not kept" in error and "could not be kept" in facts["error"]


def test_two_starts_at_once_on_an_empty_cache_both_serve(
    checkpoint: Path, tmp_path: Path, expected: tuple[Path, list[Any]]
) -> None:
    with process("serve", checkpoint, tmp_path) as one_start:
        found, error = run("serve", checkpoint, tmp_path)
        out, other_error = one_start.communicate(timeout=600)
    other = json.loads(out.splitlines()[-1])
    assert found[0] == other[0] == expected[1][0]
    assert found[1]["missing"] == other[1]["missing"] == 0
    assert not [line for line in (error + other_error).splitlines() if "anew" in line]


def interrupted_starts(checkpoint: Path, cache: Path, signals: list[int], seed: int) -> None:
    """Send a signal at a random moment of each of several cold starts, over one cache."""
    moments = random.Random(seed)
    for number in signals:
        with process("serve", checkpoint, cache) as made:
            time.sleep(moments.uniform(0.5, 8))
            made.send_signal(number)
            made.communicate(timeout=60)
        assert not children_of(cache), "a process that compiles outlives its engine"


def children_of(cache: Path) -> list[str]:
    """Return the command lines of processes that compile, once they had time to end."""
    for _ in range(100):
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                line = path.with_name("cmdline").read_bytes()
                parent = path.with_name("stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if b"compiling_process" in line and parent == "1":
                found.append(line.decode())
        if not found:
            break
        time.sleep(0.1)
    return found


def test_interrupted_starts_leave_nothing_broken(
    checkpoint: Path, tmp_path: Path, expected: tuple[Path, list[Any]]
) -> None:
    """`python -m tests.engine.test_programs_behind` interrupts more of them."""
    interrupted_starts(checkpoint, tmp_path, [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], 1)
    (answers, facts), error = run("serve", checkpoint, tmp_path)
    assert answers == expected[1][0]
    assert facts["waited"] == 0 and facts["missing"] == 0 and facts["error"] is None
    assert "anew" not in error


def main() -> None:
    """Interrupt 20 starts with each signal."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save_checkpoint(Path(folder, "checkpoint"))
        expected = run("serve", checkpoint, Path(folder, "other"))[0][0]
        for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
            cache = Path(folder, f"cache {number}")
            interrupted_starts(checkpoint, cache, [number] * 20, number)
            (answers, facts), error = run("serve", checkpoint, cache)
            assert answers == expected and facts["missing"] == 0 and "anew" not in error
            print(f"20 starts ended by {signal.Signals(number).name}: the next one is whole")


if __name__ == "__main__":
    main()
