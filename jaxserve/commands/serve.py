"""`jaxserve serve`: models over HTTP."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from jaxserve.commands.options import (
    CommandError,
    add_engine,
    add_fields,
    engine_settings,
    given,
)
from jaxserve.config import api_keys_from_environment
from jaxserve.server.http.listener import bind
from jaxserve.server.served.specs import check_models, plan_models
from jaxserve.server.settings import ServerConfig


def add_serve(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare `jaxserve serve`."""
    parser = add_parser(
        "serve",
        allow_abbrev=False,
        help="answer OpenAI's HTTP API",
        description="Serve models over HTTP, as the OpenAI client and others like it expect.",
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="[NAME=]MODEL",
        help="checkpoint folders, .gguf files or names on the hub, each with the name to serve it "
        "by (default: the bundled model)",
    )
    server = parser.add_argument_group("server")
    add_fields(server, ServerConfig, [field.name for field in dataclasses.fields(ServerConfig)])
    add_engine(parser, "For each model.", ["seed"])
    parser.set_defaults(run=serve)


def serve(arguments: argparse.Namespace) -> int:
    """Run `jaxserve serve`.

    Raises:
        CommandError: a setting is wrong, a model cannot be loaded, or the port is taken.
    """
    fields = [field.name for field in dataclasses.fields(ServerConfig)]
    settings: dict[str, Any] = {"api_key": api_keys_from_environment() or None}
    try:
        config = ServerConfig(**settings | given(arguments, fields))
        specs = plan_models(arguments.models, engine_settings(arguments), config)
        check_models(specs)
        with bind(config.host, config.port) as listener:
            module = importlib.import_module("jaxserve.commands.server")  # imports JAX
            return module.serve(specs, config, listener)
    except (ValueError, OSError) as error:  # wrong settings, files or port
        raise CommandError(str(error)) from error
