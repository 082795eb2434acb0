"""KVEventsConfig: settings for publishing changes of the prefix cache, under vLLM's names."""

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
    """Settings of the events that tell other processes which pages the prefix cache contains.

    Names, defaults and meanings follow vLLM 0.33. Events contain the token ids of prompts and
    answers, and every process that can reach an endpoint can read them.

    Args:
        enable_kv_cache_events: publish events.
        publisher: "zmq", or "null" to disable events. The default is "zmq" if events are enabled.
        endpoint: address of the PUB socket. The socket binds it if the host is `*`, `::` or 0.0.0.0
            or if it begins with ipc://, and otherwise connects to a subscriber there.
        replay_endpoint: address of a ROUTER socket that sends earlier batches again, or None.
        buffer_steps: number of event batches stored for the replay.
        hwm: number of event batches that wait for a slow subscriber, which misses later ones.
        max_queue_size: number of changes that wait to be sent. Beyond it the oldest are dropped.
        topic: first frame of every message.

    Raises:
        InvalidRequest: names the field and the allowed values.
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
            or not self.topic.isprintable()  # false for half of a surrogate pair
        ):
            raise _fault("topic", f"a printable text of at most {_MOST_BYTES} bytes", self.topic)

    @property
    def publishes(self) -> bool:
        """Whether events are enabled and the publisher is "zmq"."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    def for_rank(self, rank: int) -> KVEventsConfig:
        """Return the settings for one of several engines that share this configuration.

        As in vLLM, the rank is added to a TCP port, except port 0, which the system chooses. A path
        gets `_dp` and the rank at its end. Rank 0 keeps the settings.

        Args:
            rank: number of the engine, from 0.

        Raises:
            InvalidRequest: the port would be out of range.
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
    """Return the value of the setting kv_events_config as a KVEventsConfig, or None if it is None.

    Args:
        value: a KVEventsConfig, a dict of its fields, or JSON text.

    Raises:
        InvalidRequest: the value is not an object, or a field is unknown or out of range.
    """
    if value is None or isinstance(value, KVEventsConfig):
        return value
    fields = json_object(value, NAME) or {}
    check_fields(fields, KVEventsConfig, NAME)
    return KVEventsConfig(**fields)


def _fault(name: str, allowed: str, value: Any) -> InvalidRequest:
    return InvalidRequest(f"{NAME}.{name} must be {allowed}; got {str(value)[:100]!r}", NAME)


def _check_endpoint(name: str, value: Any) -> None:
    match = _ENDPOINT.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[1] or 0) > 65535:
        raise _fault(name, "like tcp://*:5557, tcp://HOST:PORT or ipc://PATH", value)


def _port(endpoint: str) -> int:
    match = _ENDPOINT.fullmatch(endpoint)
    return 1 if match is None or match[1] is None else int(match[1])  # 1 for a path


def _for_rank(endpoint: str, rank: int) -> str:
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}" if int(port) else endpoint
