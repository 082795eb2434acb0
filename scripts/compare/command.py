"""jaxserve and other engines on one workload, with the same weights, in one run.

    python -m scripts.compare --prepare                  installs, and warms compile caches
    python -m scripts.compare                            everything, interleaved repeats
    python -m scripts.compare --resume --max-seconds 150 a slice of it, and on later
    python -m scripts.compare --models tiny --repeats 1 --trace 8 --json /tmp/quick.json
    python -m scripts.compare --url theirs=http://10.0.0.7:8000 --models wide \\
        --engines jaxserve --json /tmp/theirs.json               a server that runs already
    python -m scripts.compare --write --write-readme     table, plots and README only

Every engine runs as a server process with `--threads` threads, is asked by the same client over
HTTP (prompts as token ids, greedy, the end of sequence ignored), and is stopped while another is
measured, so that they take turns in every repeat though each is started once a model. The client
runs on the same cores. Prefix caches are off. Engines without such a server get a small one
(scripts/compare/worker_http.py). First their greedy answers are judged by Transformers in float64.
Then single stream, offline throughput, latency under load and memory are measured. A server at
--url must hold one of these models. Their checkpoints lie in the user's cache folder, in
engines/models. Engines are installed on first use, each in an environment of its own in that
folder. An engine that cannot be installed is named with the reason. The exit status is 1 where a
part failed, answers differ or a goal was missed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import URLError

from scripts.compare import gates, parts, report, verdicts
from scripts.compare.arguments import GOES_ON, RESULTS, read_options
from scripts.compare.engine import Engine, Setting, Url
from scripts.compare.engine_jaxserve import Jaxserve, JaxserveSchedules
from scripts.compare.engine_llamacpp import LlamaCpp
from scripts.compare.engine_openvino import OpenVino
from scripts.compare.engine_transformers import Transformers, TransformersContinuous
from scripts.compare.engine_vllm import Vllm
from scripts.compare.environments import NotInstalled, cache_folder, python_of, versions
from scripts.compare.parts import PARTS, Plan, Subject
from scripts.compare.process import Servers, Started
from scripts.compare.results import Results, read_results
from scripts.compare.workloads import MAX_LEN, PROMPT
from scripts.lib.model_shapes import dtype_of, shape_of
from scripts.lib.random_checkpoint import config_of, random_checkpoint
from scripts.lib.run_record import command_line, plain
from scripts.lib.server_process import ask, free_port

ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Jaxserve(),
        JaxserveSchedules(),
        Transformers(),
        TransformersContinuous(),
        LlamaCpp(),
        Vllm(),
        OpenVino(),
    )
}
# Parts of each model. `schedules` is for one engine, which has no other part.
PARTS_OF = {
    "wide": ("agreement", "single", "trace", "mixed", "serve", "curve"),
    "wide-bf16": ("agreement", "single", "trace", "mixed"),
    "small": ("agreement", "single", "mixed"),
    "small-bf16": ("agreement", "single", "mixed"),
    "deep": ("agreement", "single", "trace", "mixed"),
    "lfm2": ("agreement", "single", "prompts", "rows"),
    "lfm2-bf16": ("agreement", "single", "prompts", "rows"),
    "tiny": ("agreement", "single", "trace", "mixed", "serve", "curve"),
    "tiny-bf16": ("agreement", "single", "mixed"),
}
# One repeat is enough: answers do not change, the rest is for plots, and bench_offline.py
# compares schedules on more requests.
ONCE = ("agreement", "serve", "curve", "schedules")
# By model and engine: once too, so that the whole stays short. `mixed` compares them as well.
SELDOM: dict[tuple[str, str], tuple[str, ...]] = {
    (model, engine): ("trace",)
    for model in ("wide", "wide-bf16")
    for engine in ("transformers", "transformers-cb", "llama.cpp", "vllm", "openvino")
}
NEVER = {
    "transformers": ("mixed", "curve"),
    "transformers-cb": ("mixed", "curve", "serve", "single"),
}
# Only on some models.
PLACES = {
    "transformers-cb": ("wide", "tiny", "tiny-bf16"),
    "jaxserve-schedules": ("wide", "deep", "tiny"),
}


@dataclass
class Task:
    """One turn of one engine, and the parts to measure in it."""

    model: str
    engine: Engine
    repeat: int
    parts: list[str]


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Gather the settings that records must share to be compared."""
    names = "threads rows batches trace mixed single served rate goodput crowds".split()
    asked = {name: getattr(options, name) for name in names}
    goodput = [f"{name}:{limit:g}" for name, limit in options.goodput]
    lists = {name: ",".join(map(str, asked[name])) for name in ("batches", "crowds")}
    return asked | lists | {"goodput": goodput}


def plan_of(options: argparse.Namespace, model: str) -> Plan:
    names = ("rows", "trace", "mixed", "single", "served", "rate")
    return Plan(
        **{name: getattr(options, name) for name in names},
        vocabulary=config_of(shape_of(model))["vocab_size"],
        objectives=dict(options.goodput),
        crowds=tuple(options.crowds),
        batches=tuple(options.batches),
    )


def setting_of(model: str, rows: int, threads: int) -> Setting:
    """Return the settings of all engines. Write the checkpoint where it is not there."""
    folder = cache_folder()
    checkpoint = random_checkpoint(shape_of(model), folder / "models")
    longest = MAX_LEN + PROMPT if "prompts" in PARTS_OF[model] else MAX_LEN
    return Setting(checkpoint, rows, longest, threads, dtype_of(model), folder)


def engines_of(options: argparse.Namespace) -> list[Engine]:
    urls = [Url(name=name, title=name, base_url=url) for name, url in options.url]
    return [ENGINES[name] for name in options.engines] + urls


def make_tasks(options: argparse.Namespace, results: Results) -> list[Task]:
    """List the turns of the engines, in another order in every repeat, measured ones left out."""
    tasks = []
    for model in options.models:
        # Answers first: a model's speeds are measured when they have been judged.
        for repeat in (None, *range(options.repeats)):
            engines = engines_of(options)
            first = -(repeat or 0) % len(engines)
            for engine in engines[first:] + engines[:first]:
                names = parts_of(model, engine, repeat)
                key = {"model": model, "engine": engine.name, "repeat": repeat or 0}
                names = [n for n in names if n in options.parts]
                names = [n for n in names if not results.has(key | {"part": n})]
                if names and "missing" not in results.data["engines"].get(engine.name, {}):
                    tasks.append(Task(model, engine, repeat or 0, names))
    return tasks


def parts_of(model: str, engine: Engine, repeat: int | None) -> list[str]:
    """List the parts of one turn. None is the turn before the first, for answers."""
    names = PARTS_OF[model]
    if isinstance(engine, JaxserveSchedules):
        names = ("schedules",) if "trace" in names else ()
    if model not in PLACES.get(engine.name, (model,)):
        return []
    names = [n for n in names if n not in NEVER.get(engine.name, ())]
    if repeat is None:
        return [n for n in names if n == "agreement"]
    once = (*ONCE, *SELDOM.get((model, engine.name), ()))
    return [n for n in names if n != "agreement" and not (repeat and n in once)]


def first_model(url: str) -> str:
    """Find the first model that a server lists.

    Raises:
        RuntimeError: it lists no model, or does not speak the protocol.
    """
    try:
        return ask(url + "/v1/models")["data"][0]["id"]
    except (HTTPException, ValueError, LookupError, TypeError) as error:
        raise RuntimeError(f"{url}/v1/models lists no model ({error!r})") from None


class Comparison:
    """Comparison that installs, starts, measures, and writes its results after each part."""

    def __init__(self, options: argparse.Namespace, results: Results) -> None:
        self._options, self._results = options, results
        self._begin = time.monotonic()
        self._servers = Servers(self.start)
        self._given = dict(options.python)
        self._is_judge_gone = False

    def is_over(self) -> bool:
        return time.monotonic() - self._begin > self._options.max_seconds

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begin:6.0f} s] {text}", flush=True)

    def setting(self, model: str, engine: Engine) -> Setting:
        rows = self._options.rows
        if isinstance(engine, JaxserveSchedules):
            rows = max(self._options.batches)
        return setting_of(model, rows, self._options.threads)

    def start(self, engine: Engine, model: str) -> Started:
        """Install the engine and convert the checkpoint where that was not done. Return its server.

        Raises:
            NotInstalled: it cannot be had here.
        """
        python = python_of(engine, self._given)
        self._note(engine, versions(python, engine.version_of) | engine.facts(python))
        setting = self.setting(model, engine)
        engine.prepare(python, setting)
        port = free_port()
        return Started(
            engine.command(python, setting, port),
            engine.environment(python, setting),
            f"http://127.0.0.1:{port}",
            cache_folder() / f"{engine.name}.log",
            self._options.threads,
        )

    def prepare(self, tasks: list[Task]) -> None:
        """Start everything once, so that packages, converted models and programs are kept."""
        done = set()
        for task in tasks:
            what = (task.engine.name, task.model)
            if what in done or isinstance(task.engine, Url):
                continue
            done.add(what)
            self.say(f"{task.engine.title}: {task.model}")
            try:
                with self.start(task.engine, task.model) as process:
                    self.say(f"  first start took {process.start_seconds:.1f} s")
                    task.engine.settle(process.url)
            except (NotInstalled, RuntimeError, OSError, subprocess.CalledProcessError) as error:
                self.say(f"  {error}")

    def measure_all(self, tasks: list[Task]) -> None:
        """Measure while there is time. Judge answers before other parts are measured."""
        with self._servers:
            for number, task in enumerate(tasks):
                if self.is_over():
                    return
                if "agreement" not in task.parts:
                    self.judge()
                if "missing" not in self._results.data["engines"].get(task.engine.name, {}):
                    self.say(f"turn {number + 1} of {len(tasks)}")
                    self.measure(task)

    def measure(self, task: Task) -> None:
        """Measure all parts of one turn. Record a failure and go on."""
        engine, results = task.engine, self._results
        key = {"model": task.model, "engine": engine.name, "repeat": task.repeat}
        self.say(f"{engine.title}: {task.model}, repeat {task.repeat + 1}")
        try:
            if isinstance(engine, Url):
                served = first_model(engine.base_url)
                self._note(engine, {})
                self._parts(task, Subject(engine.base_url, served, engine.extra, None), key)
                return
            with self._servers.awake(engine, task.model) as (process, is_new):
                if is_new:
                    self.say(f"  ready after {process.start_seconds:.1f} s")
                    start = {"part": "start", "seconds": round(process.start_seconds, 2)}
                    results.add(key | start)
                    engine.settle(process.url)
                served = first_model(process.url)
                self._parts(task, Subject(process.url, served, engine.extra, process), key)
        except NotInstalled as reason:
            self._results.data["engines"][engine.name] = {
                "title": engine.title,
                "missing": plain(str(reason)),
            }
            self._results.save()
            self.say(f"  not installed: {reason}")
        except (RuntimeError, URLError, OSError, subprocess.CalledProcessError) as error:
            results.add(key | {"part": "start", "error": _last_words(error)})
            self.say(f"  {_last_words(error)}")

    def _note(self, engine: Engine, found: dict[str, str]) -> None:
        self._results.note(engine.name, engine.title, found, engine.settings)

    def _parts(self, task: Task, subject: Subject, key: dict[str, Any]) -> None:
        plan = plan_of(self._options, task.model)
        parts.warm(subject, plan)
        for name in task.parts:
            if self.is_over():
                return
            begin = time.monotonic()
            try:
                record = PARTS[name](subject, plan)
            except RuntimeError as error:
                record: dict[str, Any] = {"error": str(error)}
            if subject.process is not None:
                record["peak_bytes"] = subject.process.peak_bytes
            record["took_seconds"] = round(time.monotonic() - begin, 1)
            self._results.add(key | {"part": name} | record)
            speed = record.get("output_throughput")
            shown = record.get("error") or (f"{speed:.1f} output tokens/s" if speed else "")
            self.say(f"  {name} took {record['took_seconds']} s  {shown}")

    def judge(self) -> None:
        if self._is_judge_gone or not verdicts.waiting(self._results):
            return
        try:
            python = python_of(ENGINES["transformers"], self._given)
        except NotInstalled as reason:
            self.say(f"answers are not judged: {reason}")
            return
        try:
            verdicts.judge(self._results, python, self._options.threads, self.say)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            self._is_judge_gone = True
            self.say(f"answers are not judged: {_last_words(error)}")


def _last_words(error: Exception) -> str:
    said = getattr(error, "stderr", None) or str(error)
    text = said.decode(errors="replace") if isinstance(said, bytes) else said
    return (text.strip().splitlines()[-1:] or ["failed"])[0][-500:]


def main() -> int:
    options = read_options(ENGINES)
    try:
        return run(options)
    except ValueError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    """Run the comparison. Return the exit status.

    Raises:
        ValueError: no part is selected, or the results file has another format or settings.
    """
    if options.write:
        return publish(options, read_results(options.json))
    results = Results(options.json, settings_of(options), options.resume)
    results.begin(" ".join(command_line()))
    tasks = make_tasks(options, results)
    if not (tasks or results.records):
        raise ValueError("nothing to measure: these --models, --engines and --parts do not meet")
    comparison = Comparison(options, results)
    if options.prepare:
        comparison.prepare(tasks)
        return 0
    comparison.measure_all(tasks)
    comparison.judge()
    if "date" not in results.data:  # no part was begun within --max-seconds
        return GOES_ON
    status = publish(options, results.data)
    return GOES_ON if comparison.is_over() and make_tasks(options, results) else status


def publish(options: argparse.Namespace, data: dict[str, Any]) -> int:
    """Write and print the report. Return the exit status, 1 for failed parts and missed goals."""
    report.write(data, options.json)
    if options.write_readme:
        readme = RESULTS.parent / "README.md"
        section = report.section_of(report.stored(RESULTS.parent))
        readme.write_text(report.replaced(readme.read_text(), section))
    print(report.table(data))
    faults = gates.faults(data)
    print("\n".join(faults))
    return 1 if faults else 0
