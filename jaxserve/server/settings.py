"""ServerConfig: a server's settings. Standard library only: the command line reads it."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass, field
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.server.tool_calls.formats import CALL_FORMATS
from jaxserve.server.tool_calls.thoughts import THINKING_FORMATS
from jaxserve.settings.checks import exact_int, finite_float

MAX_SOCKET_PATH = 107  # bytes, by Linux
# Integer fields with their ranges, and fields in seconds.
_COUNTS = {
    "port": (0, 65535),
    "max_connections": (1, 2**20),
    "max_body_bytes": (1, 2**30),
    "max_json_depth": (1, 500),
    "max_json_nodes": (1, 10**8),
    "max_prompts": (1, 4096),
    "max_unread_tokens": (1, 2**20),
    "send_buffer_bytes": (1024, 2**30),
    "max_stored_responses": (0, 2**20),
    "max_stored_response_bytes": (0, 2**40),
    "max_file_bytes": (1, 2**40),
    "max_files_bytes": (1, 2**50),
    "max_files": (1, 2**20),
    "max_batch_lines": (1, 2**24),
    "max_batches": (1, 4096),
}
_SECONDS = (
    "header_timeout",
    "body_timeout",
    "keep_alive_timeout",
    "write_timeout",
    "queue_timeout",
    "request_timeout",
    "drain_timeout",
    "health_timeout",
    "stored_response_seconds",
)
# Host and port, by name or number, with or without the scheme and the path of a URL.
_ENDPOINT = re.compile(r"((https?|grpc)://)?([\w.-]+|\[[\da-fA-F:.]+\])(:\d{1,5})?(/[\w./%~-]*)?")


Texts = tuple[str, ...] | list[str] | None
# For the command line: an option has several words, or is repeated for each entry.
_WORDS, _ENTRIES = {"words": True}, {"entries": True}


@dataclass(frozen=True)
class ServerConfig:
    """Settings of a server. Names follow vLLM. Times are in seconds.

    Args:
        headless: run a part of the engine of another host, which serves. For node_rank above 0.
        host: address to listen on. Addresses other than loopback need an api_key, or insecure.
        port: port to listen on. 0 takes a free one.
        served_model_name: names of the model in requests, like a b. Answers carry the first one.
            Only for a single model, which precedes this option on a command line.
        model_weights: shares of the memory for several models, like a=2,b=1. The default is equal
            shares.
        api_key: keys, one of which every request must carry, as `Authorization: Bearer` or
            `x-api-key`. Only /health, its other names /v1/health and /ping, /ready, and the files
            of the page at / are open without a key. Also read from JAXSERVE_API_KEY.
        insecure: listen on other addresses than loopback without an api_key.
        allowed_origins: origins of web pages on other servers that may call this server.
        allowed_hosts: names, besides those of loopback, that requests to a loopback address may
            carry as Host.
        strict: refuse unknown fields instead of ignoring them.
        share_prefix_cache: let requests with different keys reuse each other's cached prefixes.
        max_num_queued_reqs: completions that may wait for a slot. The default is 4 for each slot
            and at least 128. Beyond the limit requests are answered 429.
        max_queued_prompt_tokens: prompt tokens that may wait to be computed. The default is the
            number of tokens in 64 full steps. Beyond the limit requests are answered 429.
        queue_timeout: longest wait of a request for its start.
        request_timeout: longest duration of a request.
        write_timeout: longest time in which a client reads no bytes of an answer that is ready.
        max_unread_tokens: tokens that a stream buffers for a slow reader before it is paused.
        send_buffer_bytes: bytes of an answer that may be in the kernel, and again in the process,
            before the reader counts as slow.
        header_timeout: longest time for a client to send the headers of a request.
        body_timeout: longest time for a client to send the body of a request.
        keep_alive_timeout: how long an idle connection stays open.
        drain_timeout: how long running requests may continue after SIGTERM.
        health_timeout: how long the engine may make no progress before /health reports it.
        max_connections: largest number of open connections.
        max_body_bytes: largest body of a request.
        max_json_depth: deepest nesting in the JSON of a request.
        max_json_nodes: largest number of values and commas in the JSON of a request.
        tool_call_parser: format in which the model writes tool calls. The default follows its chat
            template.
        enable_auto_tool_choice: let models choose whether to call tools.
        reasoning_parser: format in which the model marks its thinking before the answer. The
            default follows its chat template.
        max_prompts: largest number of completions (prompts times n) of one request.
        max_stored_responses: responses stored in memory, so that requests can continue them
            (previous_response_id) or generate them in the background, and as many conversations.
            Beyond the limit, the oldest one of the API key with the most is removed. 0 stores
            no responses.
        max_stored_response_bytes: memory for the responses together, and for the conversations.
            Beyond the limit, the oldest one of the API key with the most is removed.
        stored_response_seconds: how long each of them is stored.
        files_dir: a folder for files and batches (/v1/files, /v1/batches), which are refused
            without it. A batch that the end of the server interrupts continues at the next start.
        max_file_bytes: largest file in files_dir.
        max_files_bytes: size of all files together. Each API key has an equal share.
        max_files: number of files. Each API key has an equal share, at least 1.
        max_batch_lines: largest number of requests in a batch.
        max_batches: batches in progress. Each API key has an equal share, at least 1.
        otlp_traces_endpoint: collector for OpenTelemetry traces, with a span for each completion:
            http://HOST:4318/v1/traces, or HOST:4317 for gRPC. Needs the extra `otel`.
        chat_template: chat template in place of the checkpoint's: a file, a template, or the name
            of a shipped one (alpaca, chatml, gemma, llama2, llama3, mistral, phi3, vicuna, zephyr).
        trust_request_chat_template: let requests carry a chat_template.
        default_chat_template_kwargs: inputs of the chat template. The chat_template_kwargs of a
            request take precedence.
        reasoning_effort_map: efforts of requests, each with the effort for the template, like
            {"medium": "low"}.
        return_tokens_as_token_ids: show tokens of log-probabilities as token_id:N.
        enable_force_include_usage: put the usage so far into every event of a stream.
        enable_per_request_metrics: put times into the `metrics` of answers with one completion. A
            stream carries them with its usage.
        open_metrics: serve GET /metrics without an api_key, as vLLM does, for routers that have no
            key, like llm-d's.
        server_dev_mode: serve POST /reset_prefix_cache and GET /server_info even without api_key.
        enable_weight_updates: let clients replace the weights, pause the server and let it sleep
            (POST /start_weight_update and others). Needs an api_key, each of which may do so.
        weights_root: a folder, below which POST /update_weights may read checkpoints by their path.
        enable_tokenizer_info_endpoint: serve GET /tokenizer_info, which shows the chat template.
        response_role: role of the messages in answers.
        root_path: path at which a proxy shows the server, like /llm. Requests may contain it or
            not.
        uds: a Unix domain socket to listen on, instead of host and port.
        ssl_keyfile: the private key of ssl_certfile, in PEM.
        ssl_certfile: the certificates of the server, in PEM. With them it only speaks HTTPS.
        ssl_ca_certs: certificates of the authorities that sign certificates of clients.
        ssl_cert_reqs: whether clients need a certificate: 0 no, 1 optionally, 2 yes.
        ssl_ciphers: ciphers of TLS 1.2, in OpenSSL's format.
        allow_credentials: let pages of allowed_origins send credentials.
        allowed_methods: methods of their requests. The default is all.
        allowed_headers: headers of their requests. The default is all.

    Raises:
        InvalidRequest: (a ValueError) on construction, naming the field.
    """

    headless: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: Texts = field(default=None, metadata=_WORDS)
    model_weights: str | None = None
    api_key: Texts = None
    insecure: bool = False
    allowed_origins: Texts = field(default=None, metadata=_ENTRIES)
    allowed_hosts: Texts = field(default=None, metadata=_ENTRIES)
    strict: bool = False
    share_prefix_cache: bool = False
    max_num_queued_reqs: int | None = None
    max_queued_prompt_tokens: int | None = None
    queue_timeout: float = 60.0
    request_timeout: float = 600.0
    write_timeout: float = 30.0
    max_unread_tokens: int = 1000
    send_buffer_bytes: int = 128 << 10
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    keep_alive_timeout: float = 5.0
    drain_timeout: float = 30.0
    health_timeout: float = 10.0
    max_connections: int = 2048
    max_body_bytes: int = 8 << 20
    max_json_depth: int = 64
    max_json_nodes: int = 250_000
    max_prompts: int = 128
    tool_call_parser: str | None = None
    enable_auto_tool_choice: bool = True
    reasoning_parser: str | None = None
    max_stored_responses: int = 1000
    max_stored_response_bytes: int = 64 << 20
    stored_response_seconds: float = 86400.0
    files_dir: str | None = None
    max_file_bytes: int = 200 << 20
    max_files_bytes: int = 4 << 30
    max_files: int = 10_000
    max_batch_lines: int = 50_000
    max_batches: int = 16
    otlp_traces_endpoint: str | None = None
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    default_chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort_map: dict[str, Any] | None = None
    return_tokens_as_token_ids: bool = False
    enable_force_include_usage: bool = False
    enable_per_request_metrics: bool = False
    open_metrics: bool = False
    server_dev_mode: bool = False
    enable_weight_updates: bool = False
    weights_root: str | None = None
    enable_tokenizer_info_endpoint: bool = False
    response_role: str = "assistant"
    root_path: str = ""
    uds: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    ssl_ciphers: str | None = None
    allow_credentials: bool = False
    allowed_methods: Texts = field(default=None, metadata=_ENTRIES)
    allowed_headers: Texts = field(default=None, metadata=_ENTRIES)

    def __post_init__(self) -> None:
        for name, (low, high) in _COUNTS.items():
            exact_int(getattr(self, name), name, low, high)
        for name in ("max_num_queued_reqs", "max_queued_prompt_tokens"):
            if getattr(self, name) is not None:
                exact_int(getattr(self, name), name, 0, 2**31 - 1)
        for name in _SECONDS:
            if finite_float(getattr(self, name), name) <= 0:
                raise InvalidRequest(f"{name} must be more than 0 seconds", name)
        parsers = {"tool_call_parser": CALL_FORMATS, "reasoning_parser": THINKING_FORMATS}
        for name, formats in parsers.items():
            if getattr(self, name) not in (None, "none", *formats):
                raise InvalidRequest(f"{name} must be none, {', '.join(formats)}", name)
        self._check_names()
        if not 1 <= len(self.response_role) <= 64:
            raise InvalidRequest("response_role must have 1 to 64 characters", "response_role")
        collector = self.otlp_traces_endpoint
        if collector is not None and not _ENDPOINT.fullmatch(collector):
            raise InvalidRequest(
                "otlp_traces_endpoint must be a URL like http://HOST:4318/v1/traces, or HOST:4317",
                "otlp_traces_endpoint",
            )
        self._check_tls()
        self._check_updates()
        efforts = self.reasoning_effort_map or {}
        if not all(isinstance(effort, str) for effort in efforts.values()):
            raise InvalidRequest(
                "reasoning_effort_map must hold texts like low", "reasoning_effort_map"
            )
        path = self.root_path
        if path and not re.fullmatch(r"(/[\w.~-]+)+", path, re.ASCII):
            raise InvalidRequest(f"root_path must be like /llm, got {path!r}", "root_path")
        if self.uds is not None and not 0 < len(os.fsencode(self.uds)) <= MAX_SOCKET_PATH:
            raise InvalidRequest(f"uds must have 1 to {MAX_SOCKET_PATH} bytes", "uds")
        if any(not key for key in self.api_key or ()):
            raise InvalidRequest("api_key must not be empty", "api_key")
        if not (self.is_local or self.api_key or self.insecure):
            raise InvalidRequest(
                f"host {self.host!r} can be reached from elsewhere: set --api-key, or --insecure "
                "to serve everyone",
                "host",
            )

    def _check_names(self) -> None:
        names, parameter = list(self.served_model_name or ()), "served_model_name"
        for name in names:
            if not name or "," in name:
                raise InvalidRequest(
                    f"{parameter}: {name!r} is no name; several are given as words, like a b",
                    parameter,
                )
        if len(set(names)) < len(names):
            raise InvalidRequest(f"{parameter}: a name is given twice", parameter)

    def _check_tls(self) -> None:
        exact_int(self.ssl_cert_reqs, "ssl_cert_reqs", 0, 2)
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers"):
                if getattr(self, name) is not None:
                    raise InvalidRequest(f"{name} needs ssl_certfile", name)
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise InvalidRequest("ssl_cert_reqs needs ssl_ca_certs", "ssl_cert_reqs")

    def _check_updates(self) -> None:
        name = "enable_weight_updates"
        if self.enable_weight_updates and not self.api_key:
            raise InvalidRequest(f"{name} needs an api_key, which its routes require", name)
        root = self.weights_root
        if root is None:
            return
        if not self.enable_weight_updates:
            raise InvalidRequest(f"weights_root needs {name}", "weights_root")
        if not os.path.isdir(root):
            raise InvalidRequest(f"weights_root: no such folder: {root!r}", "weights_root")

    @property
    def num_keys(self) -> int:
        """Number of different API keys, or 1 if the server has no keys."""
        return max(1, len(set(self.api_key or ())))

    def share(self, limit: int) -> int:
        """Return the share of a limit for each API key: an equal part, rounded down, at least 1."""
        return max(1, limit // self.num_keys)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server, by loopback address or Unix socket."""
        if self.uds is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
