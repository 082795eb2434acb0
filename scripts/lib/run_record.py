"""Record of a run in a results file: when, where and how it was measured."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SECRETS = ("--api-key", "--header")


def about_run() -> dict[str, Any]:
    """Record command, date, machine, Python and the load. Call it before the work.

    Folders of one machine, addresses and secrets are left out of the command.
    """
    return {
        "command": plain(" ".join(without_secrets(command_line()))),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def command_line() -> list[str]:
    """Rebuild the words that this process was started with: `python -m MODULE` where it was."""
    main = sys.modules["__main__"]
    if main.__spec__ is None or sys.argv[0] != main.__file__:
        return ["python", *sys.argv]
    return ["python", "-m", main.__spec__.name.removesuffix(".__main__"), *sys.argv[1:]]


def without_secrets(words: Sequence[str]) -> list[str]:
    """Write a command line with `...` for secret options, abbreviated ones too."""
    found, is_value = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        is_secret = len(name) > 2 and any(option.startswith(name) for option in SECRETS)
        if is_value:
            found.append("...")
        else:
            found.append(f"{name}=..." if is_secret and equals else word)
        is_value = is_secret and not equals and not is_value
    return found


def keep(
    path: Path,
    results: Mapping[str, Any],
    about: Mapping[str, Any],
    always: Mapping[str, Any] | None = None,
) -> None:
    """Write parts beside the parts of earlier runs. Each keeps the facts of its own run.

    Args:
        path: absent, empty, or a file that `argument_types.results_file` accepts.
        results: by the name of each part.
        about: the facts of `about_run`, and others of this run.
        always: facts of every run.
    """
    text = path.read_text() if path.is_file() else ""
    before, always = json.loads(text) if text.strip() else {}, always or {}
    runs = before.pop("machines", {}) | before.pop("runs", {})
    # How files were that said it once, of all their parts.
    once = {name: before.pop(name) for name in about if name in before}
    parts = [name for name in before if name not in always]
    runs = (dict.fromkeys(parts, once) if once else {}) | runs | dict.fromkeys(results, about)
    whole = before | dict(always) | dict(results) | {"runs": runs}
    path.write_text(json.dumps(whole, indent=2) + "\n")


def plain(text: str) -> str:
    """Strip a message or a command of folders and addresses of one machine."""
    text = re.sub(r"\w+://\S+", "URL", text)
    return re.sub(r"(?<![\w.])/(?:[\w.+@-]+/)+", "", text)


# The widest first: flags of /proc/cpuinfo that decide how fast products are.
VECTORS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 with bfloat16 products",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
}


def machine() -> dict[str, Any]:
    """Describe the CPU by its name and vectors where /proc/cpuinfo has them, cores, memory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if "model name" in line)
        flags = next(line.split() for line in lines if line.startswith("flags"))
    except (OSError, StopIteration):
        name, flags = platform.machine(), []
    gigabytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    vectors = next((title for flag, title in VECTORS.items() if flag in flags), "")
    cpu = f"{name} ({vectors})" if vectors else name
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gib": round(gigabytes)}
