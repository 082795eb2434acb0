"""GGUF files with real weights: `jaxserve serve` and llama.cpp's server on the same file, in turn.

    python -m scripts.compare.gguf_files FILE.gguf ... --json scripts/results/bench_gguf_files.json
    python -m scripts.compare.gguf_files --random Q4_0 --random Q8_0    of the shape of Llama 3.2 1B

Each server is started, answers over HTTP, and ends before the other begins. Repeats alternate.
Measured are seconds until it is ready (the first start of jaxserve has no programs, the later ones
have them all), tokens a second of one stream of 128 tokens, the median of 7, and of 16 at once,
seconds to the first token of a prompt of about 580 tokens, and the largest resident memory of the
server until it was ready, and at all. Greedy sampling, the end of text ignored, no prefix cached.
llama.cpp is built by `python -m scripts.compare --prepare`, and gets as many slots and threads.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxserve.commands.argument_types import positive_integer
from scripts.compare.engine import Setting
from scripts.compare.engine_llamacpp import GREEDY, LlamaCpp
from scripts.compare.environments import python_of
from scripts.compare.random_gguf import FIELDS, write_random
from scripts.lib.argument_types import results_file, script_parser
from scripts.lib.processes import peak_bytes
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run
from scripts.lib.server_process import Server, Serving, ask, free_port, wait_for_programs

TOKENS, STREAMS, MANY, LENGTH, THREADS = 128, 7, 16, 580, 2
Row = dict[str, Any]
"""What is measured, by name; see `COLUMNS`."""
COLUMNS = {
    "ready_s": "ready, s",
    "single": "one stream, tokens/s",
    "many": f"{MANY} at once, tokens/s",
    "first_s": f"first token of {LENGTH}, s",
    "start_mib": "peak memory until ready, MiB",
    "peak_mib": "peak memory, MiB",
}
ENGINES = ("jaxserve", "llama.cpp")
EXTRA: dict[str, dict[str, Any]] = {"jaxserve": {"temperature": 0}, "llama.cpp": GREEDY}


@contextmanager
def serving(engine: str, file: Path, cache: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a server. Yield its address and its process once it is ready."""
    if engine == "jaxserve":
        options = ("--max-model-len", "2048", "--max-num-seqs", str(MANY))
        with Server(str(file), *options, "--compilation-cache-dir", str(cache)) as server:
            yield server.url, server.process
        return
    port, made = free_port(), LlamaCpp()
    setting = Setting(file, MANY, 2048, THREADS, "float32", cache)
    command = made.command(python_of(made, {}), setting, port)
    command[command.index("-m") + 1] = str(file)
    with Serving(command, f"http://127.0.0.1:{port}") as server:
        yield server.url, server.process


def measured(engine: str, file: Path, cache: Path) -> Row:
    began = time.monotonic()
    with serving(engine, file, cache) as (url, process):
        ready, start = time.monotonic() - began, peak_bytes(process.pid) / 2**20
        model = ask(f"{url}/v1/models")["data"][0]["id"]
        if engine == "jaxserve":
            wait_for_programs(url)

        def answer(prompt: str | list[int], tokens: int) -> int:
            body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
            return ask(f"{url}/v1/completions", body | EXTRA[engine])["usage"]["completion_tokens"]

        answer("Once upon a time", 8)
        rates: list[float] = []
        for number in range(STREAMS):  # no prompt that may have been kept
            began = time.monotonic()
            rates.append(answer(f"Sea {number} is", TOKENS) / (time.monotonic() - began))
        single = statistics.median(rates)
        with ThreadPoolExecutor(MANY) as pool:
            began = time.monotonic()
            pending = [pool.submit(answer, f"{number} ships are", TOKENS) for number in range(MANY)]
            many = sum(each.result() for each in pending) / (time.monotonic() - began)
        began = time.monotonic()
        answer(list(range(1000, 1000 + LENGTH)), 1)
        first = time.monotonic() - began
        row = {"ready_s": ready, "single": single, "many": many, "first_s": first}
        return row | {"start_mib": start, "peak_mib": peak_bytes(process.pid) / 2**20}


def median(rows: list[Row]) -> Row:
    """Return the median of each number. The first start is apart from the others."""
    row = {name: statistics.median(row[name] for row in rows) for name in COLUMNS}
    warm = [row["ready_s"] for row in rows[1:]] or [rows[0]["ready_s"]]
    return row | {"cold_s": rows[0]["ready_s"], "ready_s": statistics.median(warm)}


def compare(file: Path, repeats: int) -> list[Row]:
    found: dict[str, list[Row]] = {engine: [] for engine in ENGINES}
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(repeats):
            for engine in ENGINES:
                found[engine].append(measured(engine, file, Path(cache)))
                print(file.name, engine, found[engine][-1], flush=True)
    return [
        {"file": file.name, "engine": engine, **median(each), "repeats": each}
        for engine, each in found.items()
    ]


def table(rows: list[Row]) -> str:
    names = {"cold_s": "first start, s", **COLUMNS}
    lines = [f"| file | server | {' | '.join(names.values())} |", "|---" * (len(names) + 2) + "|"]
    for row in rows:
        cells = [f"{row[name]:.4g}" for name in names]
        lines.append(f"| {row['file']} | {row['engine']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = script_parser("scripts.compare.gguf_files", __doc__)
    parser.add_argument("file", nargs="*", type=Path)
    parser.add_argument("--random", action="append", default=[], choices=[*FIELDS])
    parser.add_argument("--repeats", type=positive_integer, default=3)
    parser.add_argument("--json", type=results_file)
    arguments = parser.parse_args()
    rows: list[Row] = []
    for file in arguments.file:
        rows += compare(file, arguments.repeats)
    for kind in arguments.random:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"random-1B-{kind}.gguf"
            write_random(file, kind)
            rows += compare(file, arguments.repeats)
    print(table(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**about_run(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    run_main(main)
