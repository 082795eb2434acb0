"""`jaxserve compile`: compilation of the programs of a later start."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from jaxserve.commands import options
from jaxserve.commands.start_output import StartOutput
from jaxserve.server.served.specs import check_models, plan_models
from jaxserve.server.settings import ServerConfig
from jaxserve.settings.environment import check_devices, prepare_process

# Options that have another meaning in vLLM.
OWN = ("device",)


def add_compile(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare the command `jaxserve compile` and its options, with argparse's `add_parser`."""
    parser = add_parser(
        "compile",
        help="build what a start needs ahead of time",
        description="Compile every program that `jaxserve serve` with the same models and engine "
        "options runs, and keep them in the compilation cache. They hold for this machine's kind "
        "of device, or for the card that --device names, and these versions; a start with others "
        "says so and compiles anew.",
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="[NAME=]MODEL",
        help="as for serve (default: the bundled model)",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help='a card that need not be there, like "NVIDIA H100", or as many as '
        "--tensor-parallel-size says; one model is compiled for it from its configuration alone; "
        "needs JAX's plugin for CUDA",
    )
    options.add_fields(parser.add_argument_group("server"), ServerConfig, ["model_weights"])
    options.add_engine(parser, "For each model.", ["seed"], OWN)
    parser.set_defaults(run=compile_programs)


def compile_programs(arguments: argparse.Namespace) -> int:
    """Run `jaxserve compile`: load each model, and compile its programs into the compilation cache.

    A report of each model is printed. With `--device`, the programs of one model are compiled for a
    card that may be absent.

    Returns:
        The exit status: 0, or 1 if the compilation cache has no folder.

    Raises:
        CommandError: a setting is invalid, or a model cannot be loaded.
    """
    if arguments.device is not None:
        return _compile_for_card(arguments)
    loaded, output = [], StartOutput(sys.stderr)
    try:
        server = ServerConfig(**options.given(arguments, ["model_weights"]))
        specs = plan_models(arguments.models, options.engine_settings(arguments), server)
        check_models(specs)
        check_devices(specs[0].config)
        load = importlib.import_module("jaxserve.start.start").load  # brings JAX with it
        for spec in specs:
            # All models stay loaded, as in `jaxserve serve`: on a GPU the cache of the next model
            # is sized by the memory that remains.
            config = replace(spec.config, wait_for_all_programs=True)
            loaded.append(load(config, output.progress))
            print(f"{spec.names[0]}: {loaded[-1].start}")
    except (ValueError, OSError) as error:
        raise options.CommandError(str(error)) from error
    finally:
        for parts in loaded:
            parts.runner.close()
    starts = [parts.start for parts in loaded]
    return 0 if all(start and start.store.folder is not None for start in starts) else 1


def _compile_for_card(arguments: argparse.Namespace) -> int:
    """Compile the programs of one model for the card of --device, which may be absent.

    The result and the errors are those of `compile_programs`.
    """
    output = StartOutput(sys.stderr)
    try:
        specs = plan_models(arguments.models, options.engine_settings(arguments), ServerConfig())
        check_models(specs)
        check_devices(specs[0].config)
        if len(specs) > 1:
            raise options.CommandError(
                "device: programs for a card are compiled for one model at a time"
            )
        prepare_process(for_gpu=True, JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1")
        compile_for_card = importlib.import_module(
            "jaxserve.start.absent_device"  # brings JAX with it
        ).compile_for_card
        on_program = partial(output.progress, "compile")
        report = compile_for_card(specs[0].config, arguments.device, on_program)
    except (ValueError, OSError) as error:
        raise options.CommandError(str(error)) from error
    print(f"{specs[0].names[0]}: {report}")
    return 0 if report.store.folder is not None else 1
