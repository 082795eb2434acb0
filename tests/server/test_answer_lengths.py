"""max_new_tokens of generation_config.json at every endpoint, with a length of its own or none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from jaxserve.config import bundled_model
from tests.support.live_server import SMALL, Server

SAY = "Write the numbers from one to forty."
TALK = [{"role": "user", "content": SAY}]
# How each endpoint is asked, names the most tokens, and counts what it gave.
ENDPOINTS = {
    "/v1/chat/completions": ({"messages": TALK}, "max_tokens", "completion_tokens"),
    "/v1/completions": ({"prompt": SAY}, "max_tokens", "completion_tokens"),
    "/v1/responses": ({"input": SAY}, "max_output_tokens", "output_tokens"),
    "/v1/messages": ({"messages": TALK}, "max_tokens", "output_tokens"),
}
ASKED = (None, 1, 3)  # fewer than the model says of itself


def lengths(server: Server) -> dict[tuple[str, int | None], int]:
    """Tokens given by each endpoint for each length asked for; messages require one."""
    model = server.request("/v1/models").json()["data"][0]["id"]
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


def test_a_checkpoints_length_is_for_requests_that_name_none(tmp_path: Path) -> None:
    model = shutil.copytree(bundled_model(), tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"max_new_tokens": 2}))
    with Server([str(model), *SMALL]) as server:
        got = lengths(server)
    defaults = {("/v1/completions", None): 16}  # OpenAI's, which vLLM keeps
    assert got == {key: defaults.get(key, key[1] or 2) for key in got}


def test_a_length_from_a_folder_limits_every_request(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_new_tokens": 2}))
    with Server([*SMALL, "--generation-config", str(tmp_path)]) as server:
        got = lengths(server)
    assert got == {key: min(key[1] or 2, 2) for key in got}
