"""Starts of jaxserve and other servers in turns: with empty caches, and warm.

    python -m scripts.compare.starts --models small,deep
    python -m scripts.compare.starts --engines jaxserve,llama.cpp --repeats 5

Each start is a process of its own, in turns with the other engines. Cold is a start with empty
folders of caches, but with the checkpoint converted and its pages in the system's cache. Warm is
the next one over the same folders. Seconds are from before the process is started to the first
answer of /health, and to that of a completion of one token. Memory is the highest sum of
resident bytes up to there. Medians of the turns are printed and stored.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any
from urllib.request import Request, urlopen

from jaxserve.commands.argument_types import positive_integer, some_of
from jaxserve.settings.environment import prepare_process
from scripts.compare.arguments import MODELS
from scripts.compare.command import ENGINES, first_model, setting_of
from scripts.compare.engine import Engine, Setting
from scripts.compare.environments import NotInstalled, python_of, versions
from scripts.compare.process import Started
from scripts.lib import paths
from scripts.lib.argument_types import results_file, script_parser
from scripts.lib.processes import memory_bytes, tree
from scripts.lib.run_main import end_at_sigterm, run_main
from scripts.lib.run_record import about_run
from scripts.lib.server_process import free_port

USUAL = "jaxserve,llama.cpp,openvino,vllm"
ROWS, THREADS = 16, 2
Numbers = dict[str, float]


def start(engine: Engine, python: Path, setting: Setting, caches: Path) -> Numbers:
    """Start a server once, over these folders of caches. Return its seconds and its memory."""
    port = free_port()
    folders = {"XDG_CACHE_HOME": caches / "cache", "TORCHINDUCTOR_CACHE_DIR": caches / "inductor"}
    environment = engine.environment(python, setting) | {k: str(v) for k, v in folders.items()}
    server = Started(
        engine.command(python, setting, port),
        environment,
        f"http://127.0.0.1:{port}",
        caches / "log",
        THREADS,
    )
    begun = time.perf_counter()
    with server:
        body = {"model": first_model(server.url), "prompt": list(range(5, 21)), "max_tokens": 1}
        complete(server.url, body | engine.extra)
        answered = time.perf_counter() - begun
        peak = max(server.peak_bytes, memory_bytes(tree(server.process.pid))) / 2**20
        engine.settle(server.url)
    return {"ready": server.start_seconds, "first answer": answered, "peak MiB": peak}


def complete(url: str, body: dict[str, Any]) -> None:
    """Complete a prompt, as a stream: one of the servers only streams."""
    data, kind = json.dumps(body | {"stream": True}).encode(), {"content-type": "application/json"}
    with urlopen(Request(url + "/v1/completions", data, kind), timeout=300) as answer:
        answer.read()


def turns(
    engines: dict[str, Path], setting: Setting, repeats: int
) -> Iterator[tuple[str, str, Numbers | str]]:
    """Start every engine cold and warm, one after the other. Yield its name, kind and numbers."""
    for _ in range(repeats):
        for name, python in engines.items():
            with tempfile.TemporaryDirectory() as temporary:
                for kind in ("cold", "warm"):
                    try:
                        yield name, kind, start(ENGINES[name], python, setting, Path(temporary))
                    except (RuntimeError, OSError) as error:
                        yield name, kind, str(error)


def installed(names: list[str], settings: list[Setting]) -> tuple[dict[str, Path], dict[str, Any]]:
    """Install engines and convert checkpoints. Return interpreters, and versions or reasons."""
    found: dict[str, Path] = {}
    about: dict[str, Any] = {}
    for name in names:
        engine = ENGINES[name]
        try:
            python = python_of(engine, {})
            for setting in settings:
                engine.prepare(python, setting)
        except (NotInstalled, CalledProcessError) as reason:
            about[name] = f"not installed: {reason}"
            print(f"{name}: {about[name]}", file=sys.stderr)
            continue
        found[name] = python
        about[name] = versions(python, engine.version_of) | engine.facts(python)
    return found, about


def medians(found: list[tuple[str, str, Numbers | str]]) -> dict[str, dict[str, Numbers | str]]:
    """Return medians by engine and kind. A kind of start that failed has its reason."""
    table: dict[str, dict[str, Numbers | str]] = {}
    for name, kind, _ in found:
        runs = [numbers for n, k, numbers in found if (n, k) == (name, kind)]
        good = [numbers for numbers in runs if isinstance(numbers, dict)]
        value: Numbers | str = str(runs[0])
        if good:
            value = {key: statistics.median(run[key] for run in good) for key in good[0]}
            value["starts"] = len(good)
        table.setdefault(name, {})[kind] = value
    return table


def show(model: str, table: dict[str, dict[str, Numbers | str]]) -> None:
    print(f"{model:<12}{'':<18}{'ready, s':>10}{'answer, s':>11}{'peak, MiB':>11}")
    for name, kinds in table.items():
        for kind, value in kinds.items():
            text = str(value)[:80]
            if isinstance(value, dict):
                text = f"{value['ready']:>10.2f}{value['first answer']:>11.2f}"
                text += f"{value['peak MiB']:>11.0f}"
            print(f"{name:<12}{kind:<18}{text}")


def main() -> int:
    parser = script_parser("scripts.compare.starts", __doc__)
    parser.add_argument("--engines", type=some_of(ENGINES), default=USUAL, help="(%(default)s)")
    parser.add_argument(
        "--models", type=some_of(MODELS), default="small,deep", help="(%(default)s)"
    )
    parser.add_argument("--repeats", type=positive_integer, default=3)
    parser.add_argument("--json", type=results_file, default=paths.RESULTS / "compare_starts.json")
    arguments = parser.parse_args()
    prepare_process()
    settings = {model: setting_of(model, ROWS, THREADS) for model in arguments.models}
    engines, about = installed(arguments.engines, list(settings.values()))
    results: dict[str, Any] = {"about": about_run(), "engines": about}
    for model, setting in settings.items():
        found: list[tuple[str, str, Numbers | str]] = []
        for turn in turns(engines, setting, arguments.repeats):
            found.append(turn)
            print(model, *turn, file=sys.stderr)
            results[model] = medians(found)
            arguments.json.write_text(json.dumps(results, indent=2) + "\n")
        show(model, results[model])
    return 0


if __name__ == "__main__":
    end_at_sigterm()
    run_main(main)
