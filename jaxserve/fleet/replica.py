"""The server of a replica: its models, application, health checks and load reports."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from jaxserve.errors import EngineDead
from jaxserve.fleet.prefixes import PrefixRecord, Recorder
from jaxserve.server import page
from jaxserve.server.http.app import App
from jaxserve.server.http.logs import log_json
from jaxserve.server.served.models import Models
from jaxserve.server.served.request_trace import open_tracer
from jaxserve.server.served.specs import ModelSpec
from jaxserve.server.served.start import start_models
from jaxserve.server.settings import ServerConfig
from jaxserve.settings.kv_events import events_config
from jaxserve.settings.secret_files import secret_file


class ReplicaServer:
    """The models of one replica, and the ASGI application that serves them.

    The constructor loads the models.

    Args:
        secret: secret of the fleet, for the keys of pages and digests.
        rank: number of the replica among the running ones, from 0.
        reports_prefixes: record the served prefixes for a router.
        hosts_secret: secret with which the hosts of the replica authenticate each other, or None.

    Attributes:
        app: the ASGI application.

    Raises:
        CheckpointError, UnsupportedModel, ValueError: see `start.start.load`.
    """

    def __init__(
        self,
        specs: Iterable[ModelSpec],
        config: ServerConfig,
        secret: bytes,
        rank: int,
        reports_prefixes: bool,
        hosts_secret: bytes | None = None,
    ) -> None:
        log_json()
        # Stored responses would be lost with the replica, and other replicas do not have them.
        self._config = replace(config, max_stored_responses=0)
        specs = list(specs)
        with ExitStack() as stack:  # secrets are in files while the models are loaded
            keys = stack.enter_context(secret_file(secret))
            hosts = None if hosts_secret is None else stack.enter_context(secret_file(hosts_secret))
            ranked = [_of_rank(spec, keys, hosts, rank * len(specs)) for spec in specs]
            self._models = start_models(ranked, self._config)
        self._tracer = open_tracer(config.otlp_traces_endpoint)
        for model in self._models.all:
            model.tracer = self._tracer
        self.app: ASGIApp = App(self._models, self._config, page.routes(), page.OPEN_PATHS).asgi
        self._record: PrefixRecord | None = None
        if reports_prefixes:
            self._record = PrefixRecord(secret, _cached_tokens(self._models))
            self.app = Recorder(self.app, self._record)
        # The objects of the start stay alive. Without freezing, collections that visit them would
        # delay every stream.
        gc.collect()
        gc.freeze()

    def check(self) -> None:
        """Check that every engine of the replica is running and makes progress.

        Raises:
            EngineDead: an engine has ended, or has made no progress for `health_timeout` seconds.
        """
        for model in self._models.all:
            if not model.llm.is_alive():
                raise EngineDead(f"the engine of {model.name} has ended")
            seconds = model.llm.standstill()
            if seconds > self._config.health_timeout:
                raise EngineDead(f"the engine of {model.name} has not moved for {seconds:.0f} s")

    def routing_stats(self) -> dict[str, Any]:
        """Return the load and the cached prefixes of this replica, by name, for routers.

        "load" is the number of requests in progress, and "prefixes" the bytes of
        `PrefixRecord.report`. The dict is empty if prefixes are not recorded.
        """
        if self._record is None:
            return {}
        live = sum(model.admission.num_live for model in self._models.all)
        return {"load": live, "prefixes": self._record.report()}

    def close(self) -> None:
        """End all requests of the replica, close its models, and free the device."""
        self._models.close()
        if self._tracer is not None:
            self._tracer.close()


def _of_rank(spec: ModelSpec, keys: Path, hosts: Path | None, ranks_before: int) -> ModelSpec:
    """Return a copy of a model's specification with the settings of one replica.

    These are the secret files and the endpoints of KV events, which differ between replicas.

    Args:
        hosts: file with the secret of the replica's hosts, or None.
        ranks_before: number of engines in replicas with a smaller rank.
    """
    events = events_config(spec.config.kv_events_config)
    if events is not None:
        events = events.for_rank(ranks_before)
    config = replace(
        spec.config, prefix_caching_secret=keys, kv_events_config=events, nodes_secret=hosts
    )
    return replace(spec, config=config)


def _cached_tokens(models: Models) -> int:
    return sum(m.llm.cache_tokens for m in models.all)
