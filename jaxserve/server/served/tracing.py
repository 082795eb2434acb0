"""RequestTracer: traces of requests, sent by OpenTelemetry's SDK under the names of vLLM's spans.

It is imported only with --otlp-traces-endpoint, since the SDK is in the extra `otel`. Names and
meanings are from vLLM 0.33's `tracing/utils.py` and `v1/engine/output_processor.py`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import jaxserve
from jaxserve.errors import InvalidRequest

_log = logging.getLogger(__name__)
PROTOCOLS = ("grpc", "http/protobuf")
EXPORT_SECONDS = 10.0  # limit for one attempt, on a thread of the SDK
FAREWELL_SECONDS = 2.0  # limit for sending queued spans when the server stops
HEADERS = ("traceparent", "tracestate")


@dataclass(frozen=True)
class FinishedRequest:
    """Data of a completion that has ended, for its span: arrival, latency, attributes and error."""

    arrived: int  # time of arrival in nanoseconds since the epoch
    latency: float  # seconds from arrival to end
    attributes: dict[str, Any]  # attributes of the span by name
    error: str | None = None  # reason for a failure or cancellation, None for success


class RequestTracer:
    """Sender of OpenTelemetry spans to a collector, through a queue in memory.

    The sender never blocks requests to wait for the collector.

    Args:
        endpoint: URL of the collector. A URL with a path, such as `http://HOST:4318/v1/traces`,
            uses OTLP over HTTP, an address without path uses gRPC.
        protocol: one of `PROTOCOLS`, which overrides the choice by the endpoint.

    Raises:
        InvalidRequest: the protocol is unknown, or the endpoint does not support it.
    """

    def __init__(self, endpoint: str, protocol: str | None = None) -> None:
        resource = Resource.create({SERVICE_VERSION: jaxserve.__version__})
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "jaxserve"}))
        resource = resource.merge(Resource({"process.pid": os.getpid()}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint, protocol)))
        self._tracer = self._provider.get_tracer("jaxserve.requests", jaxserve.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def context(self, headers: Mapping[str, str]) -> Context:
        """Return the trace context in a request's headers, or an empty context without one."""
        carrier = {name: headers[name] for name in HEADERS if name in headers}
        return self._propagator.extract(carrier, Context())

    def record(self, context: Context, ended: FinishedRequest) -> None:
        """Queue the span of a completion for the collector. Errors are logged, not raised.

        Args:
            context: trace context of the completion's HTTP request.
            ended: times, attributes and error of the completion.
        """
        try:
            span = self._tracer.start_span(
                "llm_request",
                context,
                SpanKind.SERVER,
                attributes=ended.attributes,
                start_time=ended.arrived,
            )
            if ended.error is not None:
                span.set_status(Status(StatusCode.ERROR, ended.error))
            span.end(ended.arrived + int(ended.latency * 1e9))
        except Exception:
            _log.exception("a request's trace was lost")

    def close(self) -> None:
        """Send the queued spans for up to `FAREWELL_SECONDS`. Spans that remain are lost."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(FAREWELL_SECONDS)


def _exporter(endpoint: str, protocol: str | None) -> SpanExporter:
    parts = urlsplit(endpoint)
    chosen = protocol
    if chosen is None:
        is_http = parts.scheme in ("http", "https") and parts.path not in ("", "/")
        chosen = "http/protobuf" if is_http else "grpc"
    if chosen == "grpc":
        return GrpcExporter(endpoint, insecure=parts.scheme != "https", timeout=EXPORT_SECONDS)
    if chosen == "http/protobuf":
        if parts.scheme not in ("http", "https"):
            raise InvalidRequest(
                f"otlp_traces_endpoint {endpoint!r} must be a URL, http://HOST:PORT/v1/traces, "
                "where the protocol is http/protobuf",
                "otlp_traces_endpoint",
            )
        return HttpExporter(endpoint, timeout=EXPORT_SECONDS)
    raise InvalidRequest(
        f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL must be {' or '.join(PROTOCOLS)}, got {chosen!r}",
        "otlp_traces_endpoint",
    )
