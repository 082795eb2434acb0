"""A replica's server: models, application, health and load, in the process that serves them."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from jaxserve.errors import EngineDead
from jaxserve.fleet.prefixes import PrefixRecord, Recorder
from jaxserve.kv_events import events_config
from jaxserve.server import page
from jaxserve.server.http.app import App
from jaxserve.server.http.logs import log_json
from jaxserve.server.served.models import Models
from jaxserve.server.served.request_trace import open_tracer
from jaxserve.server.served.specs import ModelSpec
from jaxserve.server.served.start import start_models
from jaxserve.server.settings import ServerConfig


class ReplicaServer:
    """Models of a replica and the application over them.

    Args:
        specs: the models to serve.
        config: the server's settings.
        secret: of the fleet's page keys.
        rank: number of the replica among those that run, from 0.
        reports_prefixes: record which prefixes are served, for a router.

    Raises:
        CheckpointError, UnsupportedModel, ValueError: see `engine.loading.load`.
    """

    def __init__(
        self,
        specs: Iterable[ModelSpec],
        config: ServerConfig,
        secret: bytes,
        rank: int,
        reports_prefixes: bool,
    ) -> None:
        log_json()
        # What a replica stores is lost with it, and another one is asked for it as likely as not.
        self._config = replace(config, max_stored_responses=0)
        with _shared(specs, secret, rank) as shared:
            self._models = start_models(shared, self._config)
        self._tracer = open_tracer(config.otlp_traces_endpoint)
        for model in self._models.all:
            model.tracer = self._tracer
        self.app: ASGIApp = App(self._models, self._config, page.routes(), page.OPEN_PATHS).asgi
        self._record: PrefixRecord | None = None
        if reports_prefixes:
            self._record = PrefixRecord(secret, _cached_tokens(self._models))
            self.app = Recorder(self.app, self._record)
        # Objects alive now live on. A collection that walked them would hold up every stream.
        gc.collect()
        gc.freeze()

    def check(self) -> None:
        """Check that every engine lives and makes progress.

        Raises:
            EngineDead: one has ended, or stands still.
        """
        for model in self._models.all:
            if not model.llm.is_alive():
                raise EngineDead(f"the engine of {model.name} has ended")
            seconds = model.llm.standstill()
            if seconds > self._config.health_timeout:
                raise EngineDead(f"the engine of {model.name} has not moved for {seconds:.0f} s")

    def routing_stats(self) -> dict[str, Any]:
        """Return what routers read of this replica: its load, and the prefixes that it holds."""
        if self._record is None:
            return {}
        live = sum(model.admission.num_live for model in self._models.all)
        return {"load": live, "prefixes": self._record.report()}

    def close(self) -> None:
        """End all requests and free the device."""
        self._models.close()
        if self._tracer is not None:
            self._tracer.close()


@contextmanager
def _shared(specs: Iterable[ModelSpec], secret: bytes, rank: int) -> Iterator[list[ModelSpec]]:
    """Yield the specifications with the fleet's secret, which lies in a file while they load."""
    specs = list(specs)
    with tempfile.TemporaryDirectory(prefix="jaxserve-") as folder:
        path = Path(folder, "secret")
        path.touch(mode=0o600)
        path.write_bytes(secret)
        yield [
            replace(spec, config=_of_rank(spec.config, path, rank * len(specs))) for spec in specs
        ]


def _of_rank(config: Any, secret: Path, ranks_before: int) -> Any:
    events = events_config(config.kv_events_config)
    own = None if events is None else events.for_rank(ranks_before)
    return replace(config, prefix_caching_secret=secret, kv_events_config=own)


def _cached_tokens(models: Models) -> int:
    return sum((m.llm.num_pages - 1) * m.llm.config.block_size for m in models.all)
