"""`jaxserve bench`: the four subcommands and their options, under vLLM's names."""

from __future__ import annotations

import argparse
import importlib
import json
import math
from collections.abc import Callable
from typing import Any

from jaxserve.commands.argument_types import (
    existing_file,
    header,
    http_url,
    integer_from_0,
    json_object,
    name_value,
    number_in,
    objective,
    positive_integer,
    positive_or_inf,
    some_of,
    writable_file,
    writable_folder,
)
from jaxserve.commands.options import MODEL_HELP, add_engine, add_sources
from jaxserve.settings.compat import BENCH

BACKENDS = ("openai", "openai-chat", "vllm")
METRICS = ("ttft", "tpot", "itl", "e2el")
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


def add_bench(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare `jaxserve bench` with its commands `serve`, `throughput`, `latency` and `startup`.

    `add_parser` is argparse's function that creates the parser of a command.
    """
    parser = add_parser(
        "bench",
        help="measure a server, or an engine's throughput, latency and starts",
        description="Measure a server, or an engine. Names, tables and files are those of "
        "`vllm bench`.",
    )
    benches = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    _add_serve(benches.add_parser)
    _add_throughput(benches.add_parser)
    _add_latency(benches.add_parser)
    _add_startup(benches.add_parser)


def _run(module: str, name: str = "run") -> Callable[[argparse.Namespace], int]:
    # The module, and with it numpy or JAX, is imported when the command runs.

    def run(arguments: argparse.Namespace) -> int:
        bench = importlib.import_module(f"jaxserve.commands.bench.{module}")
        return getattr(bench, name)(arguments)

    return run


def _range_ratio(text: str) -> dict[str, float]:
    # A number, or an object with a ratio for input and one for output.
    ratio = number_in(0, 1, below=True)
    if not text.lstrip().startswith("{"):
        return dict.fromkeys(("input", "output"), ratio(text))
    ratios = json_object(text)
    if set(ratios) != {"input", "output"}:
        raise argparse.ArgumentTypeError(f"{text!r} must name input and output")
    return {name: ratio(json.dumps(value)) for name, value in ratios.items()}


def _percentiles(text: str) -> list[float]:
    return [number_in(0, 100)(part) for part in text.split(",")]


def _custom_length(text: str) -> int:
    return -1 if text == "-1" else positive_integer(text)


def _add_dataset(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--dataset-name", choices=("random", "sharegpt", "custom"), default="random")
    group.add_argument(
        "--dataset-path", type=existing_file, metavar="FILE", help="of sharegpt or custom"
    )
    group.add_argument("--num-prompts", type=positive_integer, default=1000, metavar="N")
    group.add_argument("--seed", type=integer_from_0, default=0, metavar="N")
    group.add_argument("--disable-shuffle", action="store_true", help="keep the file's order")
    group.add_argument(
        "--no-oversample", action="store_true", help="send fewer requests where the file has fewer"
    )
    group.add_argument(
        "--input-len", type=positive_integer, metavar="N", help="short for --random-input-len"
    )
    group.add_argument(
        "--output-len", type=positive_integer, metavar="N", help="of every kind of requests"
    )
    group.add_argument("--random-input-len", type=positive_integer, default=1024, metavar="N")
    group.add_argument("--random-output-len", type=positive_integer, default=128, metavar="N")
    group.add_argument(
        "--random-range-ratio",
        type=_range_ratio,
        default=dict.fromkeys(("input", "output"), 0.0),
        metavar="R",
        help="lengths are drawn from [length * (1 - R), length * (1 + R)] (default: 0)",
    )
    group.add_argument(
        "--random-prefix-len",
        type=integer_from_0,
        default=0,
        metavar="N",
        help="tokens that all prompts begin with",
    )
    group.add_argument("--sharegpt-output-len", type=positive_integer, metavar="N")
    group.add_argument(
        "--custom-output-len",
        type=_custom_length,
        default=256,
        metavar="N",
        help="-1 takes each line's output_tokens (default: 256)",
    )
    group.add_argument(
        "--skip-chat-template", action="store_true", help="send custom prompts as they are"
    )


def _add_serve(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add_parser(
        "serve",
        help="load on a running server",
        description="Send requests to a server with OpenAI's API, and report its speed.",
    )
    server = parser.add_argument_group("server")
    server.add_argument("--backend", choices=BACKENDS, default="openai")
    server.add_argument("--base-url", type=http_url, metavar="URL")
    server.add_argument("--host", default="127.0.0.1", metavar="NAME")
    server.add_argument("--port", type=positive_integer, default=8000, metavar="N")
    server.add_argument("--endpoint", metavar="PATH", help="default: the backend's own")
    server.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    server.add_argument("--served-model-name", metavar="NAME", help="to send in place of --model")
    server.add_argument("--api-key", metavar="KEY", help="default: OPENAI_API_KEY")
    server.add_argument("--header", nargs="*", type=header, default=[], metavar="NAME=VALUE")
    server.add_argument("--insecure", action="store_true", help="do not check certificates")
    server.add_argument(
        "--tokenizer", metavar="MODEL", help="makes and counts text; default: the model's own"
    )
    server.add_argument(
        "--skip-tokenizer-init", action="store_true", help="send token ids instead of text"
    )
    server.add_argument(
        "--ready-check-timeout-sec", type=integer_from_0, default=0, metavar="N", help="seconds to "
        "wait for the server; 0 does not check"
    )  # fmt: skip
    sampling = parser.add_argument_group("sampling", "Defaults are the server's.")
    for name in SAMPLING:
        kind = int if name == "top_k" else float
        sampling.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X")
    sampling.add_argument("--ignore-eos", action="store_true", help="draw the whole length")
    sampling.add_argument("--logprobs", type=integer_from_0, metavar="N")
    sampling.add_argument("--extra-body", type=json_object, default={}, metavar="JSON")
    _add_dataset(parser)
    pace = parser.add_argument_group("pace")
    pace.add_argument(
        "--request-rate", type=positive_or_inf, default=math.inf, metavar="R", help="a second"
    )
    pace.add_argument(
        "--burstiness", type=positive_or_inf, default=1.0, metavar="B", help="1: Poisson's arrivals"
    )
    pace.add_argument("--max-concurrency", type=positive_integer, metavar="N")
    pace.add_argument("--num-warmups", type=integer_from_0, default=0, metavar="N")
    _add_report(parser)
    parser.set_defaults(run=_run("serve"), unserved=(BENCH,))


def _add_report(parser: argparse.ArgumentParser) -> None:
    report = parser.add_argument_group("report")
    report.add_argument("--percentile-metrics", type=some_of(METRICS), default=list(METRICS[:3]))
    report.add_argument("--metric-percentiles", type=_percentiles, default=[99.0], metavar="P,P")
    report.add_argument("--goodput", nargs="+", type=objective, default=[], metavar="NAME:MS")
    report.add_argument("--disable-tqdm", action="store_true", help="show no progress")
    report.add_argument("--label", metavar="TEXT", help="begins the file's name")
    report.add_argument("--save-result", action="store_true", help="write a JSON file")
    report.add_argument("--save-detailed", action="store_true", help="with every request's times")
    report.add_argument("--append-result", action="store_true", help="add to the file")
    report.add_argument("--result-dir", type=writable_folder, metavar="DIR")
    report.add_argument("--result-filename", metavar="NAME")
    report.add_argument("--metadata", nargs="*", type=name_value, default=[], metavar="NAME=VALUE")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    add_sources(parser, ["model"])
    parser.add_argument(
        "--output-json", type=writable_file, metavar="FILE", help="write the results there"
    )


def _add_throughput(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add_parser(
        "throughput",
        help="answer many prompts at once",
        description="Load a model, answer all prompts at once, and report tokens a second.",
    )
    _add_model(parser)
    parser.add_argument("--n", type=positive_integer, default=1, help="completions of a prompt")
    parser.add_argument("--num-warmups", type=integer_from_0, default=0, metavar="N")
    parser.add_argument("--disable-detokenize", action="store_true")
    _add_dataset(parser)
    add_engine(parser)
    parser.set_defaults(run=_run("offline", "run_throughput"))


def _add_latency(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add_parser(
        "latency",
        help="answer a batch, over and over",
        description="Load a model, answer the same batch over and over, and report seconds.",
    )
    _add_model(parser)
    counts: dict[str, Any] = {"input-len": 32, "output-len": 128, "batch-size": 8, "n": 1}
    for name, default in (counts | {"num-iters": 30}).items():
        parser.add_argument(f"--{name}", type=positive_integer, default=default, metavar="N")
    parser.add_argument("--num-iters-warmup", type=integer_from_0, default=10, metavar="N")
    parser.add_argument("--disable-detokenize", action="store_true")
    add_engine(parser)
    parser.set_defaults(run=_run("offline", "run_latency"))


def _add_startup(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add_parser(
        "startup",
        help="start an engine, cold and warm",
        description="Start an engine in processes of its own, with no programs kept and with those "
        "of an earlier start, and report seconds.",
    )
    _add_model(parser)
    for name, default in (("cold", 3), ("warm", 3)):
        flag = f"--num-iters-{name}"
        parser.add_argument(flag, type=positive_integer, default=default, metavar="N")
    parser.add_argument("--num-iters-warmup", type=integer_from_0, default=1, metavar="N")
    add_engine(parser, excluded=("compilation_cache_dir",))
    parser.set_defaults(run=_run("offline", "run_startup"))
