"""`jaxserve serve`: models over HTTP."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Callable, Container
from typing import Any

from jaxserve.commands.llama_flags import in_our_words
from jaxserve.commands.options import (
    CommandError,
    add_engine,
    add_fields,
    add_sources,
    add_unserved,
    engine_settings,
    given,
)
from jaxserve.commands.start_output import StartOutput, Stop
from jaxserve.commands.vllm_flags import SERVER
from jaxserve.errors import InvalidRequest
from jaxserve.fleet.options import FleetConfig, check_cluster, check_gang, check_server
from jaxserve.server.http.listener import bind, bind_path
from jaxserve.server.http.tls import check_certificates
from jaxserve.server.served.specs import ModelSpec, check_models, plan_models
from jaxserve.server.settings import ServerConfig, check_files_dir
from jaxserve.settings.config import EngineConfig, check_devices, prepare_process
from jaxserve.settings.hosts import check_secret
from jaxserve.settings.installation import install_command
from jaxserve.settings.unserved import served
from jaxserve.start.garbage import collection_paused

SERVER_FIELDS = [field.name for field in dataclasses.fields(ServerConfig)]
FLEET_FIELDS = [field.name for field in dataclasses.fields(FleetConfig)]
# Names that mean something else, or nothing, to other commands.
OWN_FIELDS = [*SERVER_FIELDS, *FLEET_FIELDS]
# Settings that name files with a secret.
SECRETS = ("prefix_caching_secret", "nodes_secret")
# What the processes of a cluster read that is started here.
_CLUSTER: dict[str, Any] = {
    "RAY_USAGE_STATS_ENABLED": 0,
    "RAY_SERVE_LOG_TO_STDERR": 0,
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "jaxserve.fleet.front.middlewares",
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_RETRIES": 1,
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": 3,
}


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
    parser.add_argument("--model", help=argparse.SUPPRESS)  # vLLM's older form, and its file's
    parser.add_argument(
        "--verbose", action="store_true", help="report the start at length, with all of its parts"
    )
    server = parser.add_argument_group("server")
    add_fields(server, ServerConfig, SERVER_FIELDS)
    add_fields(parser.add_argument_group("replicas"), FleetConfig, FLEET_FIELDS)
    add_engine(parser, "For each model.", ["seed"], OWN_FIELDS)
    add_unserved(parser, SERVER)
    add_sources(parser, [*OWN_FIELDS, "model"])
    parser.set_defaults(run=serve, examine=_refuse_llama_flags)


def _refuse_llama_flags(words: list[str], own: Container[str]) -> None:
    said = in_our_words(words, own)
    if said is not None:
        raise CommandError(said)


def serve(arguments: argparse.Namespace) -> int:
    """Run `jaxserve serve`.

    Raises:
        CommandError: a setting is wrong, a model cannot be loaded, or the port is taken.
    """
    models = arguments.models
    if arguments.model and not models:
        models = [arguments.model]
    elif arguments.model and arguments.origins.get("model") is None:
        raise CommandError(f"models are {', '.join(models)}, and --model {arguments.model} besides")
    try:
        served(given(arguments, SERVER), SERVER)
        config = ServerConfig(**given(arguments, SERVER_FIELDS))
        fleet = FleetConfig(**given(arguments, FLEET_FIELDS))
        specs = plan_models(models, engine_settings(arguments, OWN_FIELDS), config)
        check_models(specs)
        check_certificates(config)
        check_files_dir(config)
        importlib.import_module("jaxserve.server.served.chat_template").server_template(config)
        _check_hosts(specs[0].config, config, fleet)
        if not fleet.is_fleet(specs[0].config.nnodes):
            _check_engines(specs)
        if config.headless:
            module = importlib.import_module("jaxserve.commands.follow")
            return module.follow(specs[0], arguments.verbose)
        if fleet.is_fleet(specs[0].config.nnodes):
            return _serve_fleet(specs, config, fleet)
        socket = bind(config.host, config.port) if config.uds is None else bind_path(config.uds)
        with socket as listener:
            with collection_paused():
                module = importlib.import_module("jaxserve.commands.server")  # imports JAX
            return module.serve(specs, config, listener, arguments.verbose)
    except (ValueError, OSError) as error:  # wrong settings, files or port
        raise CommandError(str(error)) from error


def _check_engines(specs: list[ModelSpec]) -> None:
    """Check devices and secrets before JAX is imported."""
    check_devices(specs[0].config)
    names = [name for name in SECRETS if getattr(specs[0].config, name) is not None]
    if names:
        sharing = importlib.import_module("jaxserve.engine.sharing")  # imports numpy
        for name in names:
            sharing.read_secret(getattr(specs[0].config, name), name)


def _check_hosts(engine: EngineConfig, config: ServerConfig, fleet: FleetConfig) -> None:
    if config.headless != (engine.node_rank > 0):
        raise InvalidRequest(
            f"node_rank is {engine.node_rank}, and headless {str(config.headless).lower()}: of "
            "several hosts (nnodes) all are headless but the one of node_rank 0",
            "headless",
        )
    if fleet.is_fleet(engine.nnodes):
        check_gang(engine)
    else:
        check_secret(engine)


def _serve_fleet(specs: list[ModelSpec], config: ServerConfig, fleet: FleetConfig) -> int:
    check_server(config)
    check_cluster(fleet)
    if fleet.ray_address is None:  # a port in use is found before Ray starts
        with bind(config.host, config.port) as listener:
            config = dataclasses.replace(config, port=listener.getsockname()[1])
    is_routed = fleet.request_routing == "prefix"
    more: dict[str, Any] = {"RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": 1} if is_routed else {}
    if fleet.ray_address is None:
        # Lets a cluster of one machine have the loopback address, whatever the system.
        more["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = 0
    prepare_process(**{**_CLUSTER, **more})
    stop = Stop()
    try:
        cluster = importlib.import_module("jaxserve.fleet.cluster")
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"data_parallel_backend=ray needs Ray Serve, and {error.name} is not installed: "
            f"run {install_command('ray')}",
            "data_parallel_backend",
        ) from error
    say = StartOutput(sys.stderr, stop).say
    return cluster.serve_fleet(specs, config, fleet, say, stop.check)
