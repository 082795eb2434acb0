"""KVEventsConfig: where and how changes of the prefix cache are published, under vLLM's names."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.settings.checks import exact_int
from jaxserve.settings.overrides import check_fields, json_object

NAME = "kv_events_config"
PUBLISHERS = ("null", "zmq")
_ENDPOINT = re.compile(r"tcp://(?:\*|\[[\w:.%]+\]|[\w.-]+):(\d{1,5})|ipc://[^\0]{1,100}", re.ASCII)
_MOST_BYTES = 255


@dataclass(frozen=True)
class KVEventsConfig:
    """Settings of the events that tell others which pages the prefix cache holds.

    Names, defaults and meanings are those of vLLM 0.33's class. Events hold the token ids of
    prompts and answers, and whoever reaches an endpoint can read them.

    Args:
        enable_kv_cache_events: publish at all.
        publisher: "zmq", or "null" for none; by default "zmq" where events are enabled.
        endpoint: of the PUB socket. It is bound where it has `*`, `::` or 0.0.0.0 as its host or
            begins with ipc://; otherwise it is connected to a subscriber that has bound it.
        replay_endpoint: bound by a ROUTER socket that sends earlier batches again; None for none.
        buffer_steps: batches that are kept for it.
        hwm: batches that wait for a slow subscriber, which misses those that follow.
        max_queue_size: changes of the cache that wait to be sent; of more, the oldest are dropped.
        topic: first frame of every message.

    Raises:
        InvalidRequest: naming the field, and what it may be.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        if type(self.enable_kv_cache_events) is not bool:
            raise _fault("enable_kv_cache_events", "true or false", self.enable_kv_cache_events)
        if self.publisher is None:
            object.__setattr__(self, "publisher", PUBLISHERS[self.enable_kv_cache_events])
        if self.publisher not in PUBLISHERS:
            raise _fault("publisher", "null or zmq", self.publisher)
        for name in ("endpoint", "replay_endpoint"):
            if name == "endpoint" or self.replay_endpoint is not None:
                _check_endpoint(name, getattr(self, name))
        if self.replay_endpoint == self.endpoint and _port(self.endpoint):
            raise _fault("replay_endpoint", "another one than endpoint", self.replay_endpoint)
        for name, low, high in (
            ("buffer_steps", 0, 10**7),
            ("hwm", 1, 2**31 - 1),
            ("max_queue_size", 1, 10**7),
        ):
            exact_int(getattr(self, name), f"{NAME}.{name}", low, high)
        if (
            not isinstance(self.topic, str)
            or len(self.topic.encode(errors="replace")) > _MOST_BYTES
            or not self.topic.isprintable()  # nor half of a surrogate pair
        ):
            raise _fault("topic", f"a printable text of at most {_MOST_BYTES} bytes", self.topic)

    @property
    def publishes(self) -> bool:
        """Return whether events are published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    def for_rank(self, rank: int) -> KVEventsConfig:
        """Return the settings of the engine number `rank`, from 0, of those that share these.

        As in vLLM, TCP ports count up by the rank, but for port 0, which the system chooses; a path
        gets `_dp` and the rank at its end.

        Raises:
            InvalidRequest: there is no such port.
        """
        if not rank or not self.publishes:
            return self
        replay = self.replay_endpoint
        return replace(
            self,
            endpoint=_for_rank(self.endpoint, rank),
            replay_endpoint=None if replay is None else _for_rank(replay, rank),
        )


def events_config(
    value: KVEventsConfig | dict[str, Any] | str | None,
) -> KVEventsConfig | None:
    """Read the setting: an object of these fields, as one, as a dict or as JSON; None if absent.

    Raises:
        InvalidRequest: it is none, or a field is unknown or out of range.
    """
    if value is None or isinstance(value, KVEventsConfig):
        return value
    given = json_object(value, NAME) or {}
    check_fields(given, KVEventsConfig, NAME)
    return KVEventsConfig(**given)


def _fault(name: str, allowed: str, value: Any) -> InvalidRequest:
    return InvalidRequest(f"{NAME}.{name} must be {allowed}; got {str(value)[:100]!r}", NAME)


def _check_endpoint(name: str, value: Any) -> None:
    found = _ENDPOINT.fullmatch(value) if isinstance(value, str) else None
    if found is None or int(found[1] or 0) > 65535:
        raise _fault(name, "like tcp://*:5557, tcp://HOST:PORT or ipc://PATH", value)


def _port(endpoint: str) -> int:
    """Return the port of a TCP endpoint, 0 where the system chooses it; 1 for a path."""
    found = _ENDPOINT.fullmatch(endpoint)
    return 1 if found is None or found[1] is None else int(found[1])


def _for_rank(endpoint: str, rank: int) -> str:
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}" if int(port) else endpoint
