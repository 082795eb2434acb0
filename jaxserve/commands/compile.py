"""`jaxserve compile`: programs built ahead of a start."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from dataclasses import replace

from jaxserve.commands.options import (
    CommandError,
    add_engine,
    add_fields,
    engine_settings,
    given,
)
from jaxserve.server.http.start_report import StartReport
from jaxserve.server.served.specs import check_models, plan_models
from jaxserve.server.settings import ServerConfig


def add_compile(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare `jaxserve compile`."""
    parser = add_parser(
        "compile",
        allow_abbrev=False,
        help="build what a start needs ahead of time",
        description="Compile every program that `jaxserve serve` with the same models and engine "
        "options runs, and keep them in the compilation cache. They hold for this machine's kind "
        "of device and these versions; a start with others says so and compiles anew.",
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="[NAME=]MODEL",
        help="as for serve (default: the bundled model)",
    )
    add_fields(parser.add_argument_group("server"), ServerConfig, ["model_weights"])
    add_engine(parser, "For each model.", ["seed"])
    parser.set_defaults(run=compile_programs)


def compile_programs(arguments: argparse.Namespace) -> int:
    """Run `jaxserve compile`. Return 1 where programs could not be kept.

    Raises:
        CommandError: a setting is wrong, or a model cannot be loaded.
    """
    loaded, report = [], StartReport(sys.stderr)
    try:
        server = ServerConfig(**given(arguments, ["model_weights"]))
        specs = plan_models(arguments.models, engine_settings(arguments), server)
        check_models(specs)
        load = importlib.import_module("jaxserve.engine.loading").load  # brings JAX with it
        for spec in specs:
            # All stay loaded: on a GPU the next model's cache gets what this one leaves free.
            config = replace(spec.config, wait_for_all_programs=True)
            loaded.append(load(config, report.progress))
            print(f"{spec.names[0]}: {loaded[-1].start}")
    except (ValueError, OSError) as error:
        raise CommandError(str(error)) from error
    finally:
        for parts in loaded:
            parts.runner.close()
    starts = [parts.start for parts in loaded]
    return 0 if all(start and start.store.folder is not None for start in starts) else 1
