"""max_new_tokens of generation_config.json at every endpoint, with or without a request's limit."""

from __future__ import annotations

from tests.server.conftest import Many
from tests.support.live_server import Server

SAY = "Write the numbers from one to forty."
TALK = [{"role": "user", "content": SAY}]
# The request to each endpoint, its field for the most tokens, and its count of generated tokens.
ENDPOINTS = {
    "/v1/chat/completions": ({"messages": TALK}, "max_tokens", "completion_tokens"),
    "/v1/completions": ({"prompt": SAY}, "max_tokens", "completion_tokens"),
    "/v1/responses": ({"input": SAY}, "max_output_tokens", "output_tokens"),
    "/v1/messages": ({"messages": TALK}, "max_tokens", "output_tokens"),
}
ASKED = (None, 1, 3)  # fewer than the model says of itself


def lengths(server: Server, model: str) -> dict[tuple[str, int | None], int]:
    """Return the number of generated tokens by endpoint and requested length.

    Messages require a length.
    """
    found = {}
    for path, (body, name, counted) in ENDPOINTS.items():
        for asked in ASKED:
            if asked is None and path == "/v1/messages":
                continue
            length = {} if asked is None else {name: asked}
            settings = {"model": model, "ignore_eos": True, "temperature": 0}
            answer = server.request(path, {**settings, **body, **length})
            assert answer.status == 200, answer.body
            found[path, asked] = answer.json()["usage"][counted]
    return found


def test_a_checkpoints_length_is_for_requests_that_name_none(many: Many) -> None:
    got = lengths(many.server, "short")
    defaults = {("/v1/completions", None): 16}  # OpenAI's, which vLLM keeps
    assert got == {key: defaults.get(key, key[1] or 2) for key in got}


def test_a_length_from_a_folder_limits_every_request(trusting: Server) -> None:
    got = lengths(trusting, "demo_model")
    assert got == {key: min(key[1] or 2, 2) for key in got}
