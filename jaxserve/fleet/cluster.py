"""Implementation of `jaxserve serve` with replicas: join or start a cluster, and run them."""

# Ray has no wheels for some versions of Python.
# pyright: reportMissingImports=false
from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray._private.authentication.authentication_token_setup import (
    _get_default_token_path,
    enable_token_auth_by_default,
    ensure_token_if_auth_enabled,
    maybe_enable_token_auth_if_token_available,
)
from ray.exceptions import RayError
from ray.serve.context import _get_global_client

from jaxserve.errors import InvalidRequest
from jaxserve.fleet.application import NAME, make_application
from jaxserve.fleet.choice import LOOPBACK
from jaxserve.fleet.options import FleetConfig
from jaxserve.server.served.specs import ModelSpec
from jaxserve.server.settings import ServerConfig

# Small, since replicas exchange no data through Ray's object store.
_STORE_BYTES = 128 << 20
_POLL_SECONDS = 0.2


def serve_fleet(
    specs: list[ModelSpec],
    config: ServerConfig,
    fleet: FleetConfig,
    say: Callable[[str], None],
    check: Callable[[], None],
) -> int:
    """Run replicas on Ray Serve until SIGTERM or an interrupt, then let them finish their requests.

    The cluster of `fleet.ray_address` is joined. Without an address, a cluster on this machine is
    started and ended.

    Args:
        config: settings of the server of each replica. Host and port are of the fleet.
        say: called with lines about the start.
        check: raises an exception if a signal arrived during the start.

    Returns:
        The exit status 0, since a failed start raises.

    Raises:
        InvalidRequest: the cluster cannot be reached, lacks resources, or cannot start a replica.
            See also `make_application`.
    """
    _connect(fleet)
    try:
        application = make_application(specs, config, fleet)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        options = {"host": config.host, "port": config.port, "request_timeout_s": None}
        options["keep_alive_timeout_s"] = max(1, round(config.keep_alive_timeout))
        try:
            serve.start(http_options=options, logging_config={"log_level": "WARNING"})
        except (RuntimeError, TimeoutError, RayError) as error:
            raise InvalidRequest(f"Ray Serve cannot be started: {_line(error)}") from error
        _check_port(config)
        say(f"starting {_count(fleet)} on Ray Serve")
        try:
            serve.run(application, name=NAME)
        except RuntimeError as error:
            raise InvalidRequest(f"no replica could be started: {_cause(error)}") from error
        check()
        ended = _Ended()
        say(f"ready at http://{config.host}:{config.port}")
        while not ended.has_come:
            time.sleep(_POLL_SECONDS)
        return 0
    finally:
        # Replicas finish their requests. Other applications of a joined cluster go on. A cluster
        # that this command has started ends with the connection of this process.
        with suppress(Exception):
            serve.delete(NAME)
        ray.shutdown()


class _Ended:
    """A listener for SIGTERM and SIGINT. `has_come` is True after the first signal."""

    def __init__(self) -> None:
        self.has_come = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)

    def _end(self, *_: object) -> None:
        self.has_come = True


def _connect(fleet: FleetConfig) -> None:
    local: dict[str, Any] = {
        "include_dashboard": False,
        "object_store_memory": _STORE_BYTES,
        "_node_ip_address": LOOPBACK,
    }
    logging.getLogger("ray").setLevel(logging.ERROR)
    if fleet.ray_address is None:
        _make_token()
    else:
        # Ray does so only for "auto", although clusters of `ray start` also check tokens.
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        ray.init(
            fleet.ray_address or "local",
            namespace="serve",
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
            **({} if fleet.ray_address else local),
        )
    except Exception as error:  # a plain Exception if Ray's processes start too slowly
        more = ""
        if fleet.ray_address is not None:
            more = "; does it run there, and is its token in RAY_AUTH_TOKEN or ~/.ray/auth_token?"
        raise InvalidRequest(f"ray_address: {_line(error)}{more}", "ray_address") from error


def _make_token() -> None:
    # Ray itself would create a file that every user can read.
    before = os.umask(0o077)
    try:
        if enable_token_auth_by_default():
            ensure_token_if_auth_enabled()
    finally:
        os.umask(before)
    with suppress(OSError):  # the file is missing, or the user's settings name another
        _get_default_token_path().chmod(0o600)


def _line(error: Exception | str) -> str:
    # The last line of Ray's errors is the cause.
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:500]


def _cause(error: Exception) -> str:
    # The error of the application lacks the messages of its deployments.
    application = serve.status().applications.get(NAME)
    deployments = {} if application is None else application.deployments
    messages = [deployment.message for deployment in deployments.values() if deployment.message]
    return _line(messages[0] if messages else error)


def _check_port(config: ServerConfig) -> None:
    # Serve may have been started earlier, at another port.
    client = _get_global_client()
    assert client is not None  # created by serve.start
    http = client.http_config
    if http.port != config.port:
        raise InvalidRequest(
            f"port must be {http.port}, at which Serve runs on this cluster; got {config.port}",
            "port",
        )


def _count(fleet: FleetConfig) -> str:
    if fleet.autoscaling_config is None:
        count = fleet.data_parallel_size
        return "1 replica" if count == 1 else f"{count} replicas"
    return f"up to {fleet.most_replicas()} replicas"
