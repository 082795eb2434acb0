"""`jaxserve serve`: serve models over HTTP."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Container
from functools import cache
from pathlib import Path
from typing import Any

from jaxserve.commands import options
from jaxserve.commands.start_output import StartOutput, Stop
from jaxserve.errors import InvalidRequest
from jaxserve.fleet.options import FleetConfig, check_cluster, check_gang, check_server
from jaxserve.server.http.listener import bind, bind_path, check_certificates
from jaxserve.server.http.logs import log_json
from jaxserve.server.served.specs import ModelSpec, check_models, plan_models
from jaxserve.server.settings import ServerConfig
from jaxserve.settings.compat import ENGINE, SERVER, served, table
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.environment import check_devices, prepare_process
from jaxserve.settings.hosts import check_secret
from jaxserve.settings.installation import install_command
from jaxserve.start.garbage import collection_paused

SERVER_FIELDS = [field.name for field in dataclasses.fields(ServerConfig)]
FLEET_FIELDS = [field.name for field in dataclasses.fields(FleetConfig)]
# Settings that only this command has.
OWN_FIELDS = [*SERVER_FIELDS, *FLEET_FIELDS]
# Settings that are the path of a secret.
SECRETS = ("prefix_caching_secret", "nodes_secret")
# Variables for the processes of a Ray cluster that this command starts.
_CLUSTER: dict[str, Any] = {
    "RAY_USAGE_STATS_ENABLED": 0,
    "RAY_SERVE_LOG_TO_STDERR": 0,
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "jaxserve.fleet.front.middlewares",
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_RETRIES": 1,
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": 3,
}


def add_serve(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare the command `jaxserve serve` and its options, with argparse's `add_parser`."""
    parser = add_parser(
        "serve",
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
    parser.add_argument(
        "--model", help=argparse.SUPPRESS
    )  # of older versions of vLLM, and of its files
    parser.add_argument(
        "--verbose", action="store_true", help="report the start at length, with all of its parts"
    )
    server = parser.add_argument_group("server")
    options.add_fields(server, ServerConfig, SERVER_FIELDS)
    options.add_fields(parser.add_argument_group("replicas"), FleetConfig, FLEET_FIELDS)
    options.add_engine(parser, "For each model.", ["seed"], OWN_FIELDS)
    options.add_sources(parser, [*OWN_FIELDS, "model"])
    parser.set_defaults(run=serve, examine=_refuse_llama_flags, unserved=(ENGINE, SERVER))


def _refuse_llama_flags(words: list[str], ours: Container[str]) -> None:
    if all(word.partition("=")[0] in ours for word in words if word.startswith("-")):
        return
    message = llama_command(words, ours)
    if message is not None:
        raise options.CommandError(message)


@cache
def llama_options() -> tuple[dict[str, str], dict[str, str]]:
    """Return two dicts by option of llama.cpp's server.

    The first has the equivalent option of jaxserve. The second has the reason why jaxserve does not
    support the option.
    """
    rows = table()["llama"]
    here = rows["equivalents"].items()
    equivalents = {flag: option for flags, option in here for flag in flags.split()}
    reasons = {flag: row["instead"] for row in rows["unserved"] for flag in row["flags"].split()}
    return equivalents, reasons


def llama_command(words: list[str], ours: Container[str]) -> str | None:
    """Translate a command line for llama.cpp's server to an error message with jaxserve's command.

    Args:
        words: the words after `jaxserve serve`.
        ours: options of `jaxserve serve`.

    Returns:
        A sentence with the command for jaxserve and a reason for each option without equivalent, or
        None if no word is an option of llama.cpp alone.
    """
    equivalents, reasons = llama_options()
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    foreign = [
        flag for flag in flags if (flag in equivalents or flag in reasons) and flag not in ours
    ]
    if not foreign:
        return None
    without_value = table()["llama"]["without_value"].split()
    automatic = table()["llama"]["automatic"]
    models, command, omitted = [], [], dict[str, list[str]]()
    pending = list(words)
    while pending:
        flag, equals, value = pending.pop(0).partition("=")
        if flag not in equivalents and flag not in reasons:
            command.append(shlex.quote(flag + equals + value))
            continue
        if not (equals or flag in without_value) and pending and _is_value(pending[0]):
            value = pending.pop(0)
        if flag in reasons:
            omitted.setdefault(reasons[flag], []).append(flag)
        elif "{}" not in equivalents[flag] or value not in ("", *automatic):
            option = equivalents[flag].format(shlex.quote(value))
            (models if equivalents[flag] == "{}" else command).append(option)
    # Models come first, since an option may take all words after it.
    whole = " ".join(["jaxserve serve", *models, *command])
    names = list(dict.fromkeys(foreign))
    listed = (
        f"{', '.join(names[:-1])} and {names[-1]} are options"
        if names[1:]
        else (f"{names[0]} is an option")
    )
    message = f"{listed} of llama.cpp's server: here it is `{whole}`"
    return message + "".join(f"; {', '.join(names)}: {why}" for why, names in omitted.items())


def _is_value(word: str) -> bool:
    return not word.startswith("-") or word[1:].replace(".", "", 1).isdigit()


def serve(arguments: argparse.Namespace) -> int:
    """Run `jaxserve serve`: check the settings, load the models, and serve until a signal.

    Depending on the settings, this process serves the models, runs one host's part of an engine
    (`headless`), or starts replicas on Ray Serve.

    Returns:
        The exit status.

    Raises:
        CommandError: a setting, a file or the port cannot be used.
    """
    models = arguments.models
    if arguments.model and not models:
        models = [arguments.model]
    elif arguments.model and arguments.origins.get("model") is None:
        raise options.CommandError(
            f"models are {', '.join(models)}, and --model {arguments.model} besides"
        )
    try:
        served(options.given(arguments, options.refused_names(arguments, SERVER)), (), SERVER)
        config = ServerConfig(**options.given(arguments, SERVER_FIELDS))
        fleet = FleetConfig(**options.given(arguments, FLEET_FIELDS))
        specs = plan_models(models, options.engine_settings(arguments), config)
        check_models(specs)
        check_certificates(config)
        _check_files_dir(config)
        importlib.import_module("jaxserve.server.served.chat_template").server_template(config)
        _check_hosts(specs[0].config, config, fleet)
        if not fleet.is_fleet(specs[0].config.nnodes):
            _check_engines(specs)
        if config.headless:
            return _follow(specs[0], arguments.verbose)
        if fleet.is_fleet(specs[0].config.nnodes):
            return _serve_fleet(specs, config, fleet)
        socket = bind(config.host, config.port) if config.uds is None else bind_path(config.uds)
        with socket as listener:
            with collection_paused():
                module = importlib.import_module("jaxserve.commands.server")  # imports JAX
            return module.serve(specs, config, listener, arguments.verbose)
    except (ValueError, OSError) as error:  # wrong settings, files or port
        raise options.CommandError(str(error)) from error


def _check_engines(specs: list[ModelSpec]) -> None:
    # Before JAX is imported, which takes seconds.
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
    if fleet.ray_address is None:  # report a port in use before Ray starts
        with bind(config.host, config.port) as listener:
            config = dataclasses.replace(config, port=listener.getsockname()[1])
    is_routed = fleet.request_routing == "prefix"
    more: dict[str, Any] = {"RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": 1} if is_routed else {}
    if fleet.ray_address is None:
        # Lets a cluster of one machine use the loopback address on every operating system.
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


def _follow(spec: ModelSpec, is_verbose: bool) -> int:
    """Run this host's part of an engine (by its `node_rank`) until the leader ends. Return 0."""
    log_json()
    output = StartOutput(sys.stderr, Stop(), is_verbose)
    config = spec.config
    output.say(f"loading {spec.names[0]}: host {config.node_rank} of {config.nnodes}")

    def say_ready() -> None:
        # Ctrl-C signals the whole process group. The leader finishes its requests first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        output.say(f"following {config.master_addr}:{config.master_port}")

    following = importlib.import_module("jaxserve.engine.following")  # imports JAX
    calls = following.follow(config, output.progress, say_ready)
    output.say(f"the leader has ended, after {calls} calls of programs")
    return 0


def _check_files_dir(config: ServerConfig) -> None:
    if config.files_dir is None:
        return
    folder = Path(config.files_dir).absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = f"files cannot be written to {folder} ({error.strerror})"
        raise InvalidRequest(f"files_dir: {reason}", "files_dir") from error
