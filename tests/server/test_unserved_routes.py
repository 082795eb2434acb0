"""Routes of vLLM, OpenAI, llama.cpp and Ollama: served, or answered with an alternative.

The lists come from vLLM 0.33.0 (the decorators of its routers), of llama.cpp's server, build
11434 (its README and server.cpp), of Ollama's API documentation and of OpenAI's reference. Left out
of vLLM's are /load and /server_info.
"""

from __future__ import annotations

import pytest

from jaxserve.server.api import weights
from jaxserve.server.http.app import routes
from jaxserve.settings.compat import unserved_routes
from tests.server.conftest import KEYS
from tests.support.live_server import Server

VLLM = """
GET /fault_tolerance/status /get_world_size /health /is_paused /is_sleeping /kv_event_sources /ping
GET /tokenizer_info /v1/models /version /weight_info /docs /metrics
POST /ping /abort_requests /classify /collective_rpc /finish_weight_update
POST /init_weight_transfer_engine /is_scaling_elastic_ep /pause /release_kv_cache_memory
POST /reset_encoder_cache /reset_mm_cache /reset_prefix_cache /resume
POST /shutdown_weight_transfer_engine /sleep /start_draft_weight_update /start_profile
POST /start_weight_update /stop_profile /update_weight_version /update_weights
POST /v1/load_lora_adapter /v1/unload_lora_adapter /wake_up /weight_checker
POST /inference/v1/abort_requests /pooling /v1/embeddings /score /v1/score /rerank /v1/rerank
POST /v2/rerank /v2/embed /v1/chat/completions/derender /v1/completions/derender
POST /inference/v1/generate /v1/chat/completions/render /v1/messages/render /v1/completions/render
POST /v1/responses/render /fault_tolerance/apply /invocations /tokenize /detokenize
POST /scale_elastic_ep /v1/systemone /generative_scoring /v1/messages /v1/messages/count_tokens
POST /v1/chat/completions /v1/chat/completions/batch /v1/completions /v1/decisions /v1/responses
POST /cohere/v2/chat /cohere/v2/chat/render /v1/audio/translations /v1/audio/transcriptions
"""
SOON = ("/generative_scoring", "/v1/decisions")
OPENAI = """
POST /v1/audio/speech /v1/images/generations /v1/images/edits /v1/moderations
POST /v1/fine_tuning/jobs /v1/threads /v1/threads/a/runs /v1/assistants /v1/vector_stores
POST /v1/uploads /v1/responses/compact /v1/skills /v1/containers /v1/containers/a/files /v1/evals
POST /v1/evals/a/runs /v1/live/sessions /v1/live/sessions/a/events /v1/skills/a/versions /v1/videos
POST /v1/realtime/sessions /v1/realtime/client_secrets
GET /v1/uploads /v1/vector_stores /v1/assistants /v1/realtime /v1/skills /v1/containers /v1/evals
GET /v1/skills/a/versions/1 /v1/containers/a/files/b/content /v1/evals/a/runs/b/output_items
GET /v1/live/sessions/a /v1/videos/a/content
DELETE /v1/uploads/a /v1/assistants/a /v1/skills/a /v1/containers/a/files/b /v1/evals/a/runs/b
DELETE /v1/live/sessions/a
"""
ANTHROPIC = """
POST /v1/messages/batches /v1/messages/batches/a/cancel /v1/complete /v1/skills
GET /v1/messages/batches /v1/messages/batches/a /v1/messages/batches/a/results
DELETE /v1/messages/batches/a
"""
OTHERS = """
POST /generate /generate_stream
"""
LLAMA = """
GET /v1/health /models /props /slots /lora-adapters /models/sse /tools /v1/stream
POST /completion /completions /chat/completions /responses /embedding /embeddings /infill /reranking
POST /v1/reranking /apply-template /props /slots/0 /lora-adapters /models /models/load
POST /models/unload /v1/chat/completions/control /chat/completions/input_tokens
POST /v1/chat/completions/input_tokens /responses/input_tokens /v1/responses/input_tokens
POST /cors-proxy /audio/transcriptions /v1/streams/lookup
DELETE /models
"""
OLLAMA = """
GET /api/tags /api/ps /api/version
POST /api/generate /api/chat /api/create /api/show /api/copy /api/pull /api/push /api/embed
POST /api/embeddings /api/blobs/sha256:0
DELETE /api/delete
"""


def rows(text: str) -> list[tuple[str, str]]:
    lines = [line.split() for line in text.split("\n") if line]
    return [(line[0], path) for line in lines for path in line[1:]]


SERVED = {route.path for route in routes()}  # type: ignore[attr-defined]
# Served with --enable-weight-updates: see test_weight_updates.py.
UPDATES = {route.path for route in routes() if route.endpoint.__module__ == weights.__name__}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("method", "path"), sorted({*rows(VLLM + OPENAI + LLAMA + OLLAMA + ANTHROPIC + OTHERS)})
)
def test_every_route_has_a_word(server: Server, method: str, path: str) -> None:
    answer = server.request(path, {} if method == "POST" else None, method=method)
    # It is open on other servers: see test_fields.py.
    closed = {("POST", "/models"), ("DELETE", "/models"), ("POST", "/reset_prefix_cache")}
    if path in SERVED - UPDATES and (method, path) not in closed:
        assert answer.status in (200, 400), answer.body
        return
    assert answer.status == 404
    body = answer.json()
    if path.startswith("/api/"):
        assert list(body) == ["error"]
        message = body["error"]
    else:
        message = body["error"]["message"]
    assert f" is not served{' yet' * (path in SOON)}: " in message and len(message) < 300
    if (method, path) in rows(LLAMA) and body["error"].get("code") == 404:
        assert set(body["error"]) == {"code", "message", "type"}
    elif not path.startswith("/api/"):
        assert answer.error["code"] == "not_supported"


def test_bodies_of_other_kinds_are_not_read(server: Server) -> None:
    form = {"content-type": "multipart/form-data; boundary=x"}
    answer = server.request("/v1/audio/transcriptions", b"--x\r\n", form)
    assert answer.status == 404 and "only text is served" in answer.error["message"]
    assert server.request("/v1/embeddings", b"{{{").status == 404
    # The limits of bodies, and of their kinds elsewhere, hold.
    assert server.request("/v1/embeddings", b"x" * ((8 << 20) + 1)).status == 413
    assert server.request("/v1/completions", b"--x", form).status == 415
    assert server.request("/v1/no/such", b"--x", form).status == 415


def test_other_methods_and_keys(server: Server, narrow: Server) -> None:
    for path, method in (("/v1/embeddings", "GET"), ("/api/tags", "DELETE"), ("/props", "DELETE")):
        assert server.request(path, method=method).status == 405
    for path in ("/health", "/v1/health", "/ping"):
        assert narrow.request(path).status == 200
    assert narrow.request("/ping", method="POST").status == 200
    for path in ("/api/tags", "/v1/threads/a", "/props", "/models"):
        assert narrow.request(path, headers={"authorization": "Bearer x"}).status == 401
        assert narrow.request(path, headers={"authorization": f"Bearer {KEYS[0]}"}).status != 401
    assert server.request("/nothing").error["code"] == "not_found"


def test_other_names_of_endpoints(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 2, "temperature": 0}
    texts = [
        server.request(path, body).json()["choices"][0]["text"]
        for path in ("/completions", "/v1/completions")
    ]
    assert texts[0] == texts[1]
    assert server.request("/models").json() == server.request("/v1/models").json()
    assert server.request("/ping").json() == {"status": "ok"}


def test_no_route_is_both_served_and_not() -> None:
    served = {(m, r.path) for r in routes() for m in r.methods or ()}  # type: ignore[attr-defined]
    unserved = [(m, route.path) for route in unserved_routes() for m in route.methods]
    assert len(unserved) == len(set(unserved))
    assert not served & set(unserved)
