"""RequestTrace: spans of the completions of one HTTP request, under vLLM's names."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any

from jaxserve.engine.metrics import SequenceTimes
from jaxserve.errors import InvalidRequest
from jaxserve.request import Request
from jaxserve.server.served.models import ServedModel
from jaxserve.settings.environment import traces_protocol
from jaxserve.settings.installation import install_command


def open_tracer(endpoint: str | None) -> Any:
    """Return a `tracing.RequestTracer` that sends to an endpoint, or None if the endpoint is None.

    Raises:
        InvalidRequest: OpenTelemetry's SDK is not installed, or does not support the endpoint.
    """
    if endpoint is None:
        return None
    try:
        tracing = importlib.import_module("jaxserve.server.served.tracing")
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"otlp_traces_endpoint needs OpenTelemetry's SDK, and {error.name} is not installed: "
            f"run {install_command('otel')}",
            "otlp_traces_endpoint",
        ) from error
    return tracing.RequestTracer(endpoint, traces_protocol())


class RequestTrace:
    """OpenTelemetry trace of one HTTP request, with one span for each completion.

    The time of construction is the time of the request's arrival.

    Args:
        model: the requested model, which has a tracer.
        headers: headers of the request, which may contain a trace context.
        request_id: id of the request, for the spans.
    """

    def __init__(self, model: ServedModel, headers: Mapping[str, str], request_id: str) -> None:
        self._model = model
        self._tracing = importlib.import_module("jaxserve.server.served.tracing")
        self._context = model.tracer.context(headers)
        self._request_id = request_id
        self._arrived = time.time_ns()

    def ended(
        self,
        request: Request,
        generated: int,
        latency: float,
        times: SequenceTimes | None = None,
        error: str | None = None,
    ) -> None:
        """Queue the span of a completion that has ended, to be sent to the collector.

        Args:
            request: the engine's request that the completion belongs to.
            generated: number of generated tokens.
            latency: seconds since the arrival of the request.
            times: times of the completion's sequence, or None if no token has ended it.
            error: reason for a failure or cancellation, or None.
        """
        sampling = request.sampling
        attributes: dict[str, Any] = {
            "gen_ai.request.id": self._request_id,
            "gen_ai.request.n": sampling.n,
            "gen_ai.response.model": self._model.name,
            "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
            "gen_ai.usage.completion_tokens": generated,
            "gen_ai.latency.e2e": latency,
        }
        if times is not None:
            attributes |= {
                "gen_ai.latency.time_in_queue": times.queue,
                "gen_ai.latency.time_to_first_token": times.first_token - times.arrived,
                "gen_ai.latency.time_in_model_prefill": times.prefill,
                "gen_ai.latency.time_in_model_decode": times.decode,
                "gen_ai.latency.time_in_model_inference": times.inference,
            }
        # Like vLLM, omit values that are 0 or unset.
        for name in ("top_p", "max_tokens", "temperature"):
            value = getattr(sampling, name)
            if value:
                attributes[f"gen_ai.request.{name}"] = value
        ended = self._tracing.FinishedRequest(self._arrived, latency, attributes, error)
        self._model.tracer.record(self._context, ended)
