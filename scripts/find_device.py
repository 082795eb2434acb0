"""Choice of the JAX build for this machine's driver and cards, for scripts/bootstrap.

Prints three lines: cpu, cuda12 or cuda13, then the cards to use, if some cannot be, then the
reason.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import signal
import subprocess
from dataclasses import dataclass

# Of the driver, for CUDA 12 and 13 (docs.jax.dev, "Installation").
OLDEST_DRIVERS = {"cuda13": 580, "cuda12": 525}
# Compute capability that each was still built for. Below 8.0 plain XLA computes in float16.
OLDEST_CARDS = {"cuda13": (7, 5), "cuda12": (7, 0)}
# Drivers without persistence need several seconds a card to wake up.
SECONDS = 40.0
QUERY = "driver_version,compute_cap,uuid,name"
ROW = re.compile(r"(?P<driver>\d+)(?:\.\d+)+, (?P<cap>\d+\.\d+), (?P<uuid>[\w-]+), (?P<name>.+)")


@dataclass(frozen=True)
class Choice:
    """A build of JAX: its extra, the cards it may use ("" for all) and a sentence saying why."""

    build: str
    cards: str
    why: str


def find(seconds: float = SECONDS) -> Choice:
    """Choose the build that fits this machine. Never fails, and waits at most `seconds`."""
    found = _reason_against() or _query(QUERY, seconds)
    if isinstance(found, subprocess.CompletedProcess):
        return _judge(found, seconds)
    return Choice("cpu", "", found)


def _reason_against() -> str | None:
    platforms = os.environ.get("JAX_PLATFORMS", "").lower()
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return f"JAX_PLATFORMS is {platforms}"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every card"
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        return f"there is no JAX with CUDA for {system} on {machine}"
    return None


def _query(fields: str, seconds: float) -> subprocess.CompletedProcess[str] | str:
    """Run nvidia-smi. Return its result, or a sentence if it has none.

    On a broken driver it can wait in the kernel, where not even a signal ends it: it is left there.
    """
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError:
        return "there is no nvidia-smi, so no NVIDIA driver"
    except OSError as error:
        return f"nvidia-smi cannot be run: {error.strerror}"
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        if process.stdout:
            process.stdout.close()
        return f"nvidia-smi did not answer within {seconds:g} s"
    return subprocess.CompletedProcess(command, process.returncode, output)


def _judge(result: subprocess.CompletedProcess[str], seconds: float) -> Choice:
    """Choose by the output of nvidia-smi."""
    lines = [line.strip() for line in result.stdout.splitlines() if line.strip()]
    if result.returncode:
        return Choice("cpu", "", _failure(result, lines, seconds))
    if not lines:
        return Choice("cpu", "", "nvidia-smi lists no card")
    rows = [ROW.fullmatch(line) for line in lines]
    matches = [row for row in rows if row]
    if not matches:
        return Choice("cpu", "", f"nvidia-smi answers {lines[0][:80]!r}, not a driver and a card")
    driver = int(matches[0]["driver"])
    builds = [name for name, oldest in OLDEST_DRIVERS.items() if driver >= oldest]
    if not builds:
        return Choice("cpu", "", _old_driver(driver))
    # The newest that runs any card: a Volta takes CUDA 12 where the driver would carry 13.
    usable: list[re.Match[str]] = []
    for build in builds:
        usable = [row for row in matches if _capability(row) >= OLDEST_CARDS[build]]
        if usable:
            break
    else:
        cards = ", ".join(sorted({f"{row['name']} has {row['cap']}" for row in matches}))
        least = ".".join(map(str, OLDEST_CARDS[builds[-1]]))
        return Choice("cpu", "", f"compute capability {least} or newer is needed; {cards}")
    cards = "" if len(usable) == len(lines) else ",".join(row["uuid"] for row in usable)
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        cards = ""  # the user has chosen
    names = ", ".join(dict.fromkeys(f"{row['name']} ({row['cap']})" for row in usable))
    return Choice(build, cards, f"{names}, driver {driver}")


def _capability(row: re.Match[str]) -> tuple[int, ...]:
    return tuple(map(int, row["cap"].split(".")))


def _old_driver(driver: int) -> str:
    return f"driver {driver} is too old; CUDA 12 needs {OLDEST_DRIVERS['cuda12']} or newer"


def _failure(result: subprocess.CompletedProcess[str], lines: list[str], seconds: float) -> str:
    """Explain why nvidia-smi failed. Drivers before 510 do not report compute capabilities."""
    if "compute_cap" in result.stdout:
        again = _query("driver_version", seconds)
        if isinstance(again, subprocess.CompletedProcess):
            version = re.match(r"(\d+)\.\d", again.stdout)
            if version and not again.returncode and int(version[1]) < OLDEST_DRIVERS["cuda12"]:
                return _old_driver(int(version[1]))
    said = f": {lines[0][:200]}" if lines else ""
    return f"nvidia-smi failed with status {result.returncode}{said}"


if __name__ == "__main__":
    choice = find()
    print(choice.build, choice.cards, " ".join(choice.why.split()), sep="\n")
