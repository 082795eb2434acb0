"""Options of `vllm serve` 0.33 that are neither fields here nor rows of `UNSERVED`."""

from __future__ import annotations

from jaxserve.settings.unserved import Unserved

# Options that have another name here.
RENAMED = {
    "device_memory_utilization": "gpu_memory_utilization",
    "max_num_queued_tokens": "max_queued_prompt_tokens",
    "shutdown_timeout": "drain_timeout",
}
# Short forms, by what they stand for; one without a field is a row of UNSERVED or below.
SHORT = {
    "quantization": "-q",
    "nnodes": "-n",
    "node_rank": "-r",
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "decode_context_parallel_size": "-dcp",
    "prefill_context_parallel_size": "-pcp",
    "data_parallel_size": "-dp",
    "data_parallel_rank": "-dpn",
    "data_parallel_start_rank": "-dpr",
    "data_parallel_size_local": "-dpl",
    "data_parallel_address": "-dpa",
    "data_parallel_rpc_port": "-dpp",
    "data_parallel_backend": "-dpb",
    "data_parallel_hybrid_lb": "-dph",
    "data_parallel_external_lb": "-dpe",
    "data_parallel_multi_port_external_lb": "-dpm",
    "enable_expert_parallel": "-ep",
    "speculative_config": "-sc",
    "diffusion_config": "-dc",
    "compilation_config": "-cc",
    "attention_config": "-ac",
    "optimization_level": "-O",
    "api_server_count": "-asc",
}

_ONE_PROCESS = "one process serves its models, and needs no other beside it"
_HTTP = "only HTTP is served"
_NO_LOG = "the log holds warnings and errors, a JSON object a line, and no requests"
_FIXED = "a request's headers are at most 100, and 32 KiB together"
_NO_TOOLS = "no tool is run by the server: clients run what the model calls"
_NO_PLUGIN = "no code of others runs in the server: leave it out"
_NO_DOCS = "the server's one document is /openapi.json"
_NOTHING = None  # any value passes: it sets what is not there to be set

# Options of the server, each with the values that change nothing.
SERVER: dict[str, Unserved] = {
    "api_server_count": Unserved((1,), _ONE_PROCESS),
    "data_parallel_supervisor_port": Unserved(_NOTHING, _ONE_PROCESS),
    "dp_supervisor_probe_interval_s": Unserved(_NOTHING, _ONE_PROCESS),
    "dp_supervisor_probe_timeout_s": Unserved(_NOTHING, _ONE_PROCESS),
    "dp_supervisor_probe_failure_threshold": Unserved(_NOTHING, _ONE_PROCESS),
    "grpc": Unserved((False,), _HTTP),
    "grpc_port": Unserved((), _HTTP),
    "enable_scale_out": Unserved((True, False), "/render and /inference/v1/generate are served"),
    "tokens_only": Unserved((False,), "--skip-tokenizer-init serves token ids alone"),
    "max_log_len": Unserved(_NOTHING, _NO_LOG),
    "uvicorn_log_level": Unserved(("critical", "error", "warning", "info"), _NO_LOG),
    "log_level": Unserved(("CRITICAL", "ERROR", "WARNING", "INFO"), _NO_LOG),
    "disable_uvicorn_access_log": Unserved((True,), _NO_LOG),
    "disable_access_log_for_endpoints": Unserved(_NOTHING, _NO_LOG),
    "enable_log_outputs": Unserved((False,), _NO_LOG),
    "enable_log_deltas": Unserved((True, False), _NO_LOG),
    "log_error_stack": Unserved((True, False), _NO_LOG),
    "logging_config": Unserved((), _NO_LOG),
    "log_config_file": Unserved((), _NO_LOG),
    "trust_request_mm_kwargs": Unserved((False,), "only text is served: leave it out"),
    "exclude_tools_when_tool_choice_none": Unserved(
        (True,), "with tool_choice none the tools stay out of the prompt"
    ),
    "tool_parser_plugin": Unserved(("",), _NO_PLUGIN),
    "tool_strict_level": Unserved(("auto",), "a tool's own `strict` holds its arguments to it"),
    "tool_server": Unserved((), _NO_TOOLS),
    "middleware": Unserved(([],), _NO_PLUGIN),
    "enable_prompt_tokens_details": Unserved((True,), "usage always has prompt_tokens_details"),
    "enable_server_load_tracking": Unserved((True, False), "GET /load always tells it"),
    "sse_keep_alive_interval": Unserved((0,), "streams hold events of answers alone"),
    "cohere_is_reasoning_model": Unserved((True, False), "Cohere's own API is not served"),
    "cohere_format": Unserved(_NOTHING, "Cohere's own API is not served"),
    "anthropic_disabled_thinking_effort": Unserved(
        ("auto", "none"), "thinking that is disabled becomes enable_thinking=false"
    ),
    "fingerprint_mode": Unserved(("none",), "system_fingerprint is null"),
    "fingerprint_value": Unserved((), "system_fingerprint is null"),
    "enable_ssl_refresh": Unserved((False,), "a new certificate needs a new start"),
    "enable_request_id_headers": Unserved((True,), "every answer carries x-request-id"),
    "disable_fastapi_docs": Unserved((True, False), _NO_DOCS),
    "enable_offline_docs": Unserved((False,), _NO_DOCS),
    "h11_max_incomplete_event_size": Unserved(_NOTHING, _FIXED),
    "h11_max_header_count": Unserved(_NOTHING, _FIXED),
}
