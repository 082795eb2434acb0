"""Secrets that engines share with others, and events of the prefix cache for a fleet."""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import stat
from hashlib import blake2b
from pathlib import Path
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.scheduling.page_keys import SECRET_BYTES
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.installation import install_command
from jaxserve.settings.kv_events import NAME, events_config

_log = logging.getLogger(__name__)
_MOST_BYTES = 1 << 16
_FIELD = "prefix_caching_secret"
# A fleet's secret is often mounted for a group: others may do nothing with it, nor the group write.
_OPEN_BITS = 0o027


def read_secret(path: str | Path | None, name: str = _FIELD) -> bytes | None:
    """Return what the file of a shared secret holds, unchanged; None where none is named.

    Args:
        name: of the setting, for errors.

    Raises:
        InvalidRequest: the file is missing, too short, too long, no file, or open to others.
    """
    if path is None:
        return None
    try:
        # A pipe would be waited for otherwise.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidRequest(f"{name}: {path} cannot be read ({reason})", name) from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise InvalidRequest(f"{name}: {path} is not a file", name)
        if mode & _OPEN_BITS:
            raise InvalidRequest(
                f"{name}: {path} is open to others (mode {stat.S_IMODE(mode):04o}); it must be "
                "the owner's alone, or its group's to read: chmod 600",
                name,
            )
        secret = os.read(descriptor, _MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if not SECRET_BYTES <= len(secret) <= _MOST_BYTES:
        size = f"{len(secret)} bytes" if len(secret) <= _MOST_BYTES else "more"
        raise InvalidRequest(
            f"{name}: {path} must hold from {SECRET_BYTES} to {_MOST_BYTES} random bytes, and "
            f"holds {size}; `openssl rand -hex 32` makes some",
            name,
        )
    return secret


def salt_secret(config: EngineConfig) -> bytes:
    """Return what a server derives the salts of its API keys from: the fleet's, or its own.

    Raises:
        InvalidRequest: see `read_secret`.
    """
    secret = read_secret(config.prefix_caching_secret)
    if secret is None:
        return secrets.token_bytes(32)
    return blake2b(secret, digest_size=32, person=b"jaxserve salts 1").digest()


def open_events(config: EngineConfig, window: int | None = None) -> Any:
    """Return an `event_publisher.EventPublisher`, or None where no events are published.

    Args:
        config: the engine's.
        window: of the model's layers, where all have the same.

    Raises:
        InvalidRequest: pyzmq is not installed, or an endpoint cannot be opened.
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
    """Check the settings of a fleet before a model is loaded, which takes long.

    Raises:
        InvalidRequest: see `read_secret` and `open_events`.
    """
    read_secret(config.prefix_caching_secret)
    read_secret(config.nodes_secret, "nodes_secret")
    if (events := open_events(config)) is not None:
        events.close()
