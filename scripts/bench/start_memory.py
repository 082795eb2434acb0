"""Host memory of a server: while it starts, while programs are compiled behind it, and at rest.

    python -m scripts.bench.start_memory --json scripts/results/bench_start_memory.json
    python -m scripts.bench.start_memory --model 135m

`jaxserve serve` is started twice over one folder of programs: cold, when it is empty, and warm.
Each answers two requests, and rests. The memory of the server and of the process that compiles
beside it is read 20 times a second: the sum of their proportional set sizes, which counts a page
that both hold once. The highest value is the start's peak. Rest is the median of the last seconds.

Memory beside weights and KV cache has three parts: the code of libraries (pages of files), the heap
of imports (that of a process that only imports the same modules), and the rest: programs,
tokenizer, and memory that the C library keeps. Each is in MiB.

Gates, over weights and cache: 600 MiB while programs are compiled, 350 in a warm start and at rest.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from scripts.bench.startup import LIMITS, LLAMAS, hold, options, write_llama
from scripts.lib.argument_types import results_file, script_parser
from scripts.lib.processes import tree
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run
from scripts.lib.server_process import Server, ask, wait_for_programs

GATES = {"cold peak": 600, "cold rest": 350, "warm peak": 350, "warm rest": 350}
INTERVAL_S, REST_S = 0.05, 16.0
MIB = 1 << 20
PLANNED = re.compile(r"weights ([\d,]+) bytes; KV cache .*? = ([\d,]+) bytes")
_IMPORTS = """\
from pathlib import Path
from jaxserve.settings.environment import prepare_process
prepare_process()
import jax, jaxserve.engine.engine, jaxserve.commands.server
jax.devices()
print(Path("/proc/self/status").read_text())
"""


def read_memory(pid: int) -> dict[str, float]:
    """Read the proportional set size of a process, and its part of pages of files, in MiB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    kinds = ("Pss", "Pss_Anon", "Pss_File")
    found = {kind: re.search(rf"^{kind}:\s+(\d+)", text, re.MULTILINE) for kind in kinds}
    return {kind: int(match[1]) / 1024 for kind, match in found.items() if match}


class MemoryRecord:
    """Record of the memory of a server, from its start on, as a context manager.

    Attributes:
        samples: time.monotonic(), and the sums over all processes, in MiB.
    """

    def __init__(self, server: Server) -> None:
        self.samples: list[tuple[float, dict[str, float]]] = []
        self._server = server
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemoryRecord:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.wait(INTERVAL_S):
            process = getattr(self._server, "process", None)
            if process is None:
                continue
            total: dict[str, float] = {}
            try:
                for pid in tree(process.pid):
                    for kind, size in read_memory(pid).items():
                        total[kind] = total.get(kind, 0.0) + size
            except OSError:  # a process has just ended
                continue
            self.samples.append((time.monotonic(), total))

    def peak(self) -> float:
        return max(sample["Pss"] for _, sample in self.samples)

    def last(self, seconds: float, kind: str) -> float:
        since = time.monotonic() - seconds
        return statistics.median(sample[kind] for moment, sample in self.samples if moment > since)


def observe(arguments: list[str]) -> dict[str, float]:
    """Start a server once. Return its memory in MiB."""
    server = Server(*arguments)
    with MemoryRecord(server) as record, server:
        name = ask(server.url + "/v1/models")["data"][0]["id"]
        wait_for_programs(server.url)
        for temperature in (0, 1):
            body = {"model": name, "prompt": list(range(5, 105)), "max_tokens": 32}
            ask(server.url + "/v1/completions", body | {"temperature": temperature})
        peak = record.peak()
        time.sleep(REST_S)
        rest = {kind: record.last(2.0, kind) for kind in ("Pss", "Pss_Anon", "Pss_File")}
        planned = PLANNED.search(server.log())
    assert planned is not None, "the server does not say what its weights and its cache take"
    weights, cache = (int(number.replace(",", "")) / MIB for number in planned.groups())
    return {
        "peak": peak,
        "rest": rest["Pss"],
        "weights": weights,
        "cache": cache,
        "code": rest["Pss_File"],
        "other": rest["Pss_Anon"] - weights - cache - anonymous_of_imports(),
    }


def anonymous_of_imports() -> float:
    """Return the memory of imports beside pages of files, in MiB."""
    command = [sys.executable, "-c", _IMPORTS]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"^RssAnon:\s+(\d+)", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def overheads(starts: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the number of each gate: the MiB over weights and cache."""
    return {
        gate: starts[start][moment] - starts[start]["weights"] - starts[start]["cache"]
        for gate in GATES
        for start, moment in [gate.split()]
    }


def report(results: dict[str, dict[str, dict[str, float]]]) -> bool:
    """Print the table and the missed gates. Return whether all gates are met."""
    names = ("peak", "rest", "weights", "cache", "code", "imports", "other")
    missed: list[str] = []
    print(f"{'MiB':<9}{'start':<8}" + "".join(f"{name:>9}" for name in names))
    for model, starts in results.items():
        for start, sizes in starts.items():
            named = sum(sizes[name] for name in ("weights", "cache", "code", "other"))
            row = sizes | {"imports": sizes["rest"] - named}
            print(f"{model:<9}{start:<8}" + "".join(f"{row[name]:>9.0f}" for name in names))
        for gate, over in overheads(starts).items():
            if over > GATES[gate]:
                missed.append(f"{model}, {gate}: {over:.0f} MiB over, most {GATES[gate]}")
    return hold(missed)


def main() -> int:
    parser = script_parser("scripts.bench.start_memory", __doc__)
    parser.add_argument("--model", choices=LIMITS, action="append", help="default: bundled")
    parser.add_argument("--json", type=results_file, help="write the numbers here")
    arguments = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for model in arguments.model or ["bundled"]:
            place = Path(temporary) / model
            place.mkdir()
            path = [write_llama(model, place / "model")] if model in LLAMAS else []
            given = [*path, "--compilation-cache-dir", str(place / "cache")]
            given += ["--verbose", *options(LIMITS[model])]
            results[model] = {start: observe(given) for start in ("cold", "warm")}
    if arguments.json:
        content = {"about": about_run(), "mib": results}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0 if report(results) else 1


if __name__ == "__main__":
    run_main(main)
