"""`jaxserve run-batch`: answer a batch file in OpenAI's format in this process."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
from collections.abc import Callable
from pathlib import Path

from jaxserve.commands import options
from jaxserve.server.served.specs import plan_models
from jaxserve.server.settings import ServerConfig

# Fields of ServerConfig that are options of this command.
SERVER_FIELDS = (
    "served_model_name tool_call_parser enable_auto_tool_choice reasoning_parser chat_template "
    "trust_request_chat_template default_chat_template_kwargs reasoning_effort_map "
    "return_tokens_as_token_ids"
).split()


def add_run_batch(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare the command `jaxserve run-batch` and its options, with argparse's `add_parser`."""
    parser = add_parser(
        "run-batch",
        help="answer a batch file of OpenAI's form",
        description="Answer a JSONL file of OpenAI's batch form with a model in this process. "
        "Answers are written as they come; custom_id says which is which. A bad line gets an "
        "error of its own. The status is 1 where a line has no good answer.",
    )
    parser.add_argument("-i", "--input-file", required=True, type=Path, metavar="FILE")
    parser.add_argument("-o", "--output-file", required=True, type=Path, metavar="FILE")
    parser.add_argument("--model", metavar="MODEL", help=options.MODEL_HELP)
    server = parser.add_argument_group("server")
    options.add_fields(server, ServerConfig, SERVER_FIELDS)
    options.add_engine(parser, None, ["seed"], SERVER_FIELDS)
    options.add_sources(parser, [*SERVER_FIELDS, "model"])
    parser.set_defaults(run=run_batch)


def run_batch(arguments: argparse.Namespace) -> int:
    """Run `jaxserve run-batch`: check the files, then answer the batch file in this process.

    Returns:
        The exit status: 1 if a line failed, else 0.

    Raises:
        CommandError: a file cannot be used, a setting is invalid, or the model cannot be loaded.
    """
    source, sink = arguments.input_file, arguments.output_file
    _check_input(source)
    _check_output(sink, source)
    module = importlib.import_module("jaxserve.commands.batch_file")  # imports JAX
    try:
        config = module.batch_config(**options.given(arguments, SERVER_FIELDS))
        importlib.import_module("jaxserve.server.served.chat_template").server_template(config)
        models = [arguments.model] if arguments.model else []
        specs = plan_models(models, options.engine_settings(arguments), config)
        return module.run_batch(specs, config, source, sink)
    except (ValueError, OSError) as error:
        raise options.CommandError(str(error)) from error


def _check_input(source: Path) -> None:
    # Opening a pipe would affect its writer.
    if not source.exists():
        raise options.CommandError(f"--input-file: there is no file {str(source)!r}")
    if source.is_dir() or not os.access(source, os.R_OK):
        raise options.CommandError(
            f"--input-file: {str(source)!r} cannot be read; allowed: a file or pipe"
        )


def _check_output(sink: Path, source: Path) -> None:
    """Check that the output file of a batch can be written. An existing file keeps its contents.

    Raises:
        CommandError: the file is the input, or it cannot be written.
    """
    is_there = sink.exists()
    if is_there and source.is_file() and sink.samefile(source):
        raise options.CommandError("--output-file: the output would overwrite the input")
    try:
        if is_there and not (sink.is_file() or sink.is_dir()):  # a pipe, or a terminal
            if not os.access(sink, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        sink.open("ab").close()
        if not is_there:
            sink.unlink()
    except OSError as error:
        message = f"--output-file: {str(sink)!r} cannot be written ({error.strerror})"
        raise options.CommandError(message) from error
