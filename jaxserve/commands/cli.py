"""The `jaxserve` command: its parser, and the call of the selected command.

Options are derived from the fields of `EngineConfig`, `ServerConfig` and `SamplingParams`:
`max_num_seqs` is `--max-num-seqs`, a boolean also has a `--no-` form, and the help text is the line
of the field in the docstring of the class. The module of a command declares its options, and
imports JAX only after the arguments have been parsed.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from typing import Any

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
from jaxserve.errors import JaxserveError
from jaxserve.settings.environment import prepare_process
from jaxserve.settings.installation import install_command
from jaxserve.start.interrupts import INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the `jaxserve` command with all subcommands.

    Parsed arguments have an attribute `run`: a function that takes the arguments, runs the selected
    subcommand and returns the exit status.
    """
    parser = CommandParser(
        prog="jaxserve", description="An LLM inference engine in JAX.", allow_abbrev=True
    )
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
    """Parse a command line, run the selected subcommand, and return the exit status.

    Errors of the input are printed to standard error.

    Args:
        argv: the words after `jaxserve`. None for those of `sys.argv`.

    Returns:
        The status of the subcommand, 2 for bad input, 130 after an interrupt, or 1 if standard
        output cannot be written.
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


class DroppingFile(io.FileIO):
    """A raw file whose `write` never fails: bytes that cannot be written are discarded."""

    def write(self, data: Any, /) -> int:
        """Write bytes and return the number of bytes written.

        If the write fails or would block, all bytes are dropped and count as written.
        """
        size = memoryview(data).nbytes
        try:
            written = super().write(data)
        except OSError:
            return size
        return size if written is None else written


def settle_streams() -> None:
    """Open closed standard streams, and make standard error discard output that it cannot write.

    Closed descriptors are opened on the null device, because the next opened file would otherwise
    get their number. Reports of progress must not end a command. Streams that a caller has replaced
    are not changed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes this number, the lowest free one
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        raw = DroppingFile(2, "w", closefd=False)
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(raw), errors="backslashreplace", line_buffering=True
        )


def drop_output() -> None:
    """Redirect standard output to the null device, so that a later flush cannot fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
