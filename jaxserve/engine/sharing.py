"""Secrets that engines share, and events of the prefix cache for routers."""

from __future__ import annotations

import importlib
import logging
import secrets
from hashlib import blake2b
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.installation import install_command
from jaxserve.settings.kv_events import NAME, events_config
from jaxserve.settings.secret_files import read_secret

_log = logging.getLogger(__name__)


def salt_secret(config: EngineConfig) -> bytes:
    """Return 32 secret bytes from which a server derives the cache salts of its clients.

    They are derived from the file of `prefix_caching_secret`, so that all servers of a fleet agree.
    Without this setting they are random.

    Raises:
        InvalidRequest: the file cannot be used (see `read_secret`).
    """
    secret = read_secret(config.prefix_caching_secret)
    if secret is None:
        return secrets.token_bytes(32)
    return blake2b(secret, digest_size=32, person=b"jaxserve salts 1").digest()


def open_events(config: EngineConfig, window: int | None = None) -> Any:
    """Create the publisher of an engine's KV events, or return None if the settings publish none.

    The result is an `event_publisher.EventPublisher` with opened sockets.

    Args:
        window: the attention window if all layers have the same, otherwise None.

    Raises:
        InvalidRequest: pyzmq or msgspec is not installed, or an endpoint cannot be opened.
    """
    events = events_config(config.kv_events_config)
    if events is None or not events.publishes:
        return None
    if not config.enable_prefix_caching:
        _log.warning("%s: nothing is published without enable_prefix_caching", NAME)
    try:
        publisher = importlib.import_module("jaxserve.engine.event_publisher")
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"{NAME} needs pyzmq and msgspec, and {error.name} is not installed: "
            f"run {install_command('events')}",
            NAME,
        ) from error
    return publisher.EventPublisher(events, config.block_size, window)


def check_sharing(config: EngineConfig) -> None:
    """Check the files of shared secrets and the endpoints of KV events, before the model is loaded.

    The endpoints are opened and closed again.

    Raises:
        InvalidRequest: a file cannot be used, or an endpoint cannot be opened.
    """
    read_secret(config.prefix_caching_secret)
    read_secret(config.nodes_secret, "nodes_secret")
    if (events := open_events(config)) is not None:
        events.close()
