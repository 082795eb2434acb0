"""Traces of requests, as collectors get them that run here: over HTTP and over gRPC."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from jaxserve.errors import InvalidRequest
from jaxserve.server.served.request_trace import open_tracer
from jaxserve.server.settings import ServerConfig
from tests.support.live_server import SMALL, Server

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TIMES = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")


class Collector:
    """Spans that came to a collector, with the attributes of the process that sent them."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.is_slow = threading.Event()
        self.ended = threading.Event()

    def take(self, sent: ExportTraceServiceRequest) -> None:
        if self.is_slow.is_set():
            self.ended.wait(60)
        for group in sent.resource_spans:
            self.resources.append(values(group.resource.attributes))
            for scope in group.scope_spans:
                self.spans += scope.spans

    def wait_for(self, request_id: str, count: int = 1) -> list[Span]:
        """Return the spans of a request once there are so many."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            found = [span for span in self.spans if request_of(span) == request_id]
            if len(found) >= count:
                return found
            time.sleep(0.02)
        raise AssertionError(f"no {count} spans of {request_id} came")


def values(attributes: Any) -> dict[str, Any]:
    """Return attributes as a dict."""
    return {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in attributes}


def request_of(span: Span) -> str:
    """Return the request id of a span that its client knows."""
    return values(span.attributes)["gen_ai.request.id"]


@contextmanager
def http_collector() -> Iterator[tuple[Collector, str]]:
    collector = Collector()

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["content-type"] == "application/x-protobuf"
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Suppress the log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector, f"http://127.0.0.1:{server.server_port}/v1/traces"
    finally:
        collector.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def grpc_collector() -> Iterator[tuple[Collector, str, Callable[[], None]]]:
    collector = Collector()

    class Service(TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:
            collector.take(request)
            return ExportTraceServiceResponse()

    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        add_TraceServiceServicer_to_server(Service(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield collector, f"127.0.0.1:{port}", lambda: server.stop(None).wait()
        finally:
            collector.ended.set()
            server.stop(None).wait()


@pytest.fixture(scope="module", autouse=True)
def _soon() -> Iterator[None]:
    """Let the SDK send every tenth of a second, not every five seconds."""
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "100"
    yield
    del os.environ["OTEL_BSP_SCHEDULE_DELAY"]


@pytest.fixture(scope="module")
def traced(_soon: None) -> Iterator[tuple[Server, Collector]]:
    with ExitStack() as stack:
        collector, url = stack.enter_context(http_collector())
        server = stack.enter_context(Server([*SMALL, "--otlp-traces-endpoint", url]))
        yield server, collector


def test_a_completions_span_is_vllms(traced: tuple[Server, Collector]) -> None:
    server, collector = traced
    began = time.time_ns()
    fields = {"prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True, "n": 2, "seed": 1}
    headers = {"x-request-id": "mine", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = fields | {"temperature": 0.5, "top_p": 0.9}
    assert server.request("/v1/completions", body, headers).status == 200
    for span in collector.wait_for("mine", 2):
        assert (span.name, span.kind) == ("llm_request", Span.SPAN_KIND_SERVER)
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert span.status.code == Status.STATUS_CODE_UNSET
        told = values(span.attributes)
        assert told["gen_ai.usage.prompt_tokens"] == 3
        assert told["gen_ai.usage.completion_tokens"] == 6
        assert (told["gen_ai.request.n"], told["gen_ai.request.max_tokens"]) == (2, 6)
        assert told["gen_ai.request.temperature"] == 0.5 and told["gen_ai.request.top_p"] == 0.9
        assert told["gen_ai.response.model"] == "demo_model"
        latency = {name: told[f"gen_ai.latency.{name}"] for name in TIMES}
        assert min(latency.values()) >= 0
        inference = told["gen_ai.latency.time_in_model_inference"]
        assert inference == pytest.approx(sum(latency.values()) - latency["time_in_queue"])
        first = told["gen_ai.latency.time_to_first_token"]
        assert first == pytest.approx(sum(latency.values()) - latency["time_in_model_decode"])
        assert latency["time_in_queue"] + inference <= told["gen_ai.latency.e2e"]
        assert began <= span.start_time_unix_nano <= time.time_ns()
        seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert seconds == pytest.approx(told["gen_ai.latency.e2e"], abs=1e-6)
    [sender] = {resource["service.name"] for resource in collector.resources}
    assert sender == "jaxserve" and collector.resources[0]["process.pid"] == server.process.pid


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_every_endpoint_is_traced(traced: tuple[Server, Collector], path: str) -> None:
    server, collector = traced
    message = [{"role": "user", "content": "Reverse: s-t-o-n-e"}]
    body = {"model": "demo_model", "max_tokens": 3, "stream": True, "messages": message}
    if path == "/v1/responses":
        body = {"input": message, "max_output_tokens": 3, "stream": True}
    answer = server.request(path, body, {"x-request-id": path})
    assert answer.status == 200
    [span] = collector.wait_for(path)
    assert len(span.trace_id) == 16 and span.parent_span_id == b""  # a trace of its own
    assert values(span.attributes)["gen_ai.usage.completion_tokens"] == 3


@pytest.mark.parametrize("parent", ["", "00-0-0-00", f"00-{'0' * 32}-{PARENT}-01", "x" * 5000])
def test_headers_that_name_no_trace_start_one(
    traced: tuple[Server, Collector], parent: str
) -> None:
    server, collector = traced
    name = f"bad-{len(parent)}-{parent[3:6]}"
    headers = {"x-request-id": name, "traceparent": parent, "tracestate": "=,=,"}
    body = {"prompt": "a", "max_tokens": 2}
    assert server.request("/v1/completions", body, headers).status == 200
    [span] = collector.wait_for(name)
    assert span.parent_span_id == b"" and any(span.trace_id)


def test_an_unsampled_trace_is_left_out(traced: tuple[Server, Collector]) -> None:
    server, collector = traced
    parent = f"00-{TRACE}-{PARENT}-00"
    for name, headers in (("off", {"traceparent": parent}), ("on", {})):
        body = {"prompt": "a", "max_tokens": 2}
        answer = server.request("/v1/completions", body, {"x-request-id": name, **headers})
        assert answer.status == 200
    collector.wait_for("on")
    assert "off" not in {request_of(span) for span in collector.spans}


def test_a_client_that_goes_away_leaves_a_span_of_an_error(
    traced: tuple[Server, Collector],
) -> None:
    server, collector = traced
    before = len(collector.spans)
    server.open_drawing(
        {"prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True}
    ).close()
    deadline = time.monotonic() + 30
    while len(collector.spans) == before and time.monotonic() < deadline:
        time.sleep(0.02)
    [span] = collector.spans[before:]
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert span.status.message == "the client went away"
    told = values(span.attributes)
    assert 0 < told["gen_ai.usage.completion_tokens"] < 400 and "gen_ai.latency.e2e" in told
    server.wait_until_idle()


def test_a_slow_collector_delays_neither_requests_nor_the_end(
    traced: tuple[Server, Collector],
) -> None:
    server, collector = traced
    expected = server.complete([5, 6, 7]).json()["choices"][0]["text"]
    collector.is_slow.set()
    for _ in range(40):  # with more spans than the SDK sends at once
        choices = server.complete([5, 6, 7], n=16).json()["choices"]
        assert [choice["text"] for choice in choices] == [expected] * 16
    assert server.metric("request_success_total", finished_reason="error") == 0
    server.process.terminate()
    assert server.process.wait(timeout=45) == 0
    assert not collector.ended.is_set()


def test_grpc_and_a_collector_that_goes_down() -> None:
    with ExitStack() as stack:
        collector, address, stop = stack.enter_context(grpc_collector())
        server = stack.enter_context(Server([*SMALL, "--otlp-traces-endpoint", address]))
        headers = {"x-request-id": "by-grpc"}
        body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0}
        text = server.request("/v1/completions", body, headers).json()["choices"][0]["text"]
        [span] = collector.wait_for("by-grpc")
        assert span.name == "llm_request"
        stop()
        for _ in range(20):
            assert server.complete([5, 6, 7]).json()["choices"][0]["text"] == text
        server.process.terminate()
        assert server.process.wait(timeout=45) == 0


@pytest.mark.parametrize(
    "text", ["", "http://", "ftp://a/b", "a b", "http://a:port/x", "http://u:p@a"]
)
def test_an_endpoint_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"otlp_traces_endpoint must be a URL") as raised:
        ServerConfig(otlp_traces_endpoint=text)
    assert raised.value.parameter == "otlp_traces_endpoint"


def test_a_protocol_that_is_none_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_tracer(None) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(InvalidRequest, match="PROTOCOL must be grpc or http/protobuf"):
        open_tracer("http://localhost:4318/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    with pytest.raises(InvalidRequest, match="must be a URL, http://HOST:PORT/v1/traces"):
        open_tracer("localhost:4317")


def test_without_the_sdk_a_sentence_says_how_to_install_it() -> None:
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "from jaxserve.commands.cli import main\n"
        "sys.exit(main(['serve', '--port', '0', '--otlp-traces-endpoint', 'localhost:4317']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("is not installed: run pip install -e '.[otel]'\n")
    assert "--otlp-traces-endpoint needs OpenTelemetry's SDK" in done.stderr
