"""The `jaxserve` command: its parser, and the call of the selected command.

Options are derived from the fields of `EngineConfig`, `ServerConfig` and `SamplingParams`:
`max_num_seqs` is `--max-num-seqs`, a boolean also has a `--no-` form, and the help text is the line
of the field in the docstring of the class. The module of a command declares its options, and
imports JAX only after the arguments have been parsed.
"""

from __future__ import annotations

import argparse
import sys

import jaxserve
from jaxserve.commands.bench.command import add_bench
from jaxserve.commands.chat import add_chat
from jaxserve.commands.collect_env import add_collect_env
from jaxserve.commands.compile import add_compile
from jaxserve.commands.convert import add_convert
from jaxserve.commands.generate import add_generate
from jaxserve.commands.options import BAD_INPUT, CommandError
from jaxserve.commands.parser import CommandParser, unknown_variables, with_options
from jaxserve.commands.plan import add_plan
from jaxserve.commands.run_batch import add_run_batch
from jaxserve.commands.serve import add_serve
from jaxserve.commands.standard_streams import drop_output, settle_streams
from jaxserve.errors import JaxserveError
from jaxserve.settings.environment import prepare_process
from jaxserve.settings.installation import install_command
from jaxserve.start.interrupts import INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. It sets `run` to the function of the selected command."""
    parser = CommandParser(prog="jaxserve", description="An LLM inference engine in JAX.")
    parser.add_argument("--version", action="version", version=f"jaxserve {jaxserve.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    add_generate(commands.add_parser)
    add_serve(commands.add_parser)
    add_convert(commands.add_parser)
    add_compile(commands.add_parser)
    add_plan(commands.add_parser)
    add_chat(commands.add_parser)
    add_run_batch(commands.add_parser)
    add_bench(commands.add_parser)
    add_collect_env(commands.add_parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command of `argv`, or of `sys.argv`.

    Returns:
        The exit status: 2 for bad input, 130 after an interrupt, 1 if standard output cannot be
        written.
    """
    settle_streams()
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe
        drop_output()
    except OSError as error:
        drop_output()
        print(f"jaxserve: error: cannot write the output: {error.strerror}", file=sys.stderr)
    return 1


def _run(argv: list[str] | None) -> int:
    prepare_process()
    parser = make_parser()
    arguments = argparse.Namespace()
    try:
        arguments = parser.parse_args(argv)
        if not hasattr(arguments, "run"):
            parser.print_help()
            return 0
        for line in unknown_variables():
            print(f"jaxserve: warning: {line}", file=sys.stderr)
        return arguments.run(arguments)
    except (JaxserveError, CommandError) as error:
        message = " ".join(str(error).split())
        # Messages about a setting begin with its name.
        origins = getattr(arguments, "origins", {})
        origin = origins.get(message.partition(" ")[0].partition("=")[0].rstrip(":"))
        message = with_options(message)
        print(f"jaxserve: error: {origin + ': ' if origin else ''}{message}", file=sys.stderr)
        return BAD_INPUT
    except ModuleNotFoundError as error:
        print(
            f"jaxserve: error: {error.name} is not installed; {install_command()} installs all "
            "that the commands need",
            file=sys.stderr,
        )
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
