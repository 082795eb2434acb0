"""The comparison's command line: its options and their allowed values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from pathlib import Path
from urllib.parse import urlsplit

from jaxserve.commands.argument_types import (
    objective,
    positive,
    positive_integer,
    positive_or_inf,
    some_of,
    writable_file,
)
from scripts.compare.parts import PARTS
from scripts.lib import paths
from scripts.lib.argument_types import integers, script_parser
from scripts.lib.model_shapes import BFLOAT16, SHAPES
from scripts.lib.trace_rows import first_rows

RESULTS = paths.RESULTS / "compare_engines.json"
MODELS = (*SHAPES, *(shape + BFLOAT16 for shape in SHAPES))
GOES_ON = 3


def _server(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    parts = urlsplit(url)
    if not name or parts.scheme not in ("http", "https") or not parts.netloc:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=URL, like x=http://10.0.0.7:8000")
    return name, url.rstrip("/").removesuffix("/v1")


def _interpreter_of(engines: Collection[str]) -> Callable[[str], tuple[str, Path]]:
    def type_(text: str) -> tuple[str, Path]:
        name, _, path = text.partition("=")
        if name not in engines or not Path(path).is_file():
            raise argparse.ArgumentTypeError(
                f"{text!r} must be ENGINE=PATH of a Python, ENGINE one of {', '.join(engines)}"
            )
        return name, Path(path)

    return type_


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options that records must share to be compared, and the number of repeats."""
    for name, default, about in (
        ("--threads", 2, "of each engine"),
        ("--rows", 16, "most sequences at once"),
        ("--repeats", 3, "turns of each"),
        ("--trace", 96, "requests of the Azure trace"),
        ("--mixed", 64, "requests of mixed lengths"),
        ("--single", 6, "requests one after another"),
        ("--served", 60, "requests under load"),
    ):
        text = f"{about} (%(default)s)"
        parser.add_argument(name, type=positive_integer, default=default, help=text)
    batches = "rows of the schedules (%(default)s)"
    parser.add_argument("--batches", type=integers, default="16", help=batches)
    rate = "requests a second under load (%(default)s)"
    parser.add_argument("--rate", type=positive, default=3.0, help=rate)
    parser.add_argument(
        "--goodput",
        nargs="+",
        type=objective,
        default=[("ttft", 1000.0), ("tpot", 50.0)],
        metavar="NAME:MS",
        help="what a request under load must meet (default: ttft:1000 tpot:50)",
    )
    crowds = "clients at once, for the curve (%(default)s)"
    parser.add_argument("--crowds", type=integers, default="1,4,16", help=crowds)


def make_parser(engines: Collection[str]) -> argparse.ArgumentParser:
    """Make the parser of the command line. `engines` are the names of those with an adapter."""
    parser = script_parser(
        "scripts.compare",
        "jaxserve and other engines on one workload, with the same weights, in one run",
    )
    every = ",".join(engines)
    parser.add_argument("--engines", type=some_of(engines), default=every, help=f"of {every}")
    parser.add_argument(
        "--models",
        type=some_of(MODELS),
        default="wide,small,wide-bf16",
        help=f"of {', '.join(SHAPES)}; with {BFLOAT16} behind it in bfloat16 (%(default)s)",
    )
    parser.add_argument(
        "--parts", type=some_of(PARTS), default=",".join(PARTS), help=f"of {','.join(PARTS)}"
    )
    parser.add_argument(
        "--url",
        action="append",
        type=_server,
        default=[],
        metavar="NAME=URL",
        help="a server of the OpenAI protocol that runs already",
    )
    parser.add_argument(
        "--python",
        action="append",
        type=_interpreter_of(engines),
        default=[],
        metavar="ENGINE=PATH",
        help="an interpreter that has the engine, instead of an own environment",
    )
    _add_sizes(parser)
    parser.add_argument(
        "--json",
        type=writable_file,
        default=str(RESULTS),
        help="the results file (default: the stored one)",
    )
    parser.add_argument("--resume", action="store_true", help="measure what the file lacks")
    parser.add_argument(
        "--max-seconds",
        type=positive_or_inf,
        default="inf",
        help=f"begin no part after these; exit status {GOES_ON} if some are left",
    )
    parser.add_argument(
        "--prepare", action="store_true", help="install and start everything once, measure nothing"
    )
    parser.add_argument("--write", action="store_true", help="measure nothing; write the report")
    parser.add_argument(
        "--write-readme",
        action="store_true",
        help="when all is measured, or at once with --write, write the stored tables"
        " into scripts/results/README.md",
    )
    return parser


def _is_part(parser: argparse.ArgumentParser, options: argparse.Namespace) -> bool:
    """Return whether less, or something else, is measured than by default, and is not kept."""
    whole = parser.parse_args([])
    free = ("json", "resume", "max_seconds", "prepare", "write", "write_readme", "python")
    alike = all(getattr(options, n) == v for n, v in vars(whole).items() if n not in free)
    return not (options.resume or options.write or alike)


def read_options(engines: Collection[str]) -> argparse.Namespace:
    """Read the options of the command line. End the process where they contradict each other."""
    parser = make_parser(engines)
    options = parser.parse_args()
    names = [name for name, _ in options.url]
    if len(names) > len(set(names)):
        parser.error(f"--url: each needs a name of its own, got {', '.join(names)}")
    if options.url and len(options.models) > 1:
        parser.error("--url: name the one of --models that the server holds")
    if taken := [name for name, _ in options.url if name in engines]:
        parser.error(f"--url: {', '.join(taken)} is an engine's own name; take another")
    for name in ("trace", "served"):
        try:
            first_rows(getattr(options, name))
        except ValueError as error:
            parser.error(f"--{name}: {error}")
    if options.json == RESULTS and _is_part(parser, options) and not options.prepare:
        parser.error("a part would replace the stored results; name another file with --json")
    if options.prepare and options.write:
        parser.error("--prepare and --write exclude each other")
    if options.write and not options.json.is_file():
        parser.error(f"--write: there is no {options.json}")
    return options
