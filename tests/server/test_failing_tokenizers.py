"""Texts and tokens that the tokenizers library panics on: refused in each API, in one log line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from jaxserve import AsyncLLM
from jaxserve.server.http.app import App
from jaxserve.server.served.models import Models, ServedModel
from jaxserve.server.settings import ServerConfig
from jaxserve.settings.config import bundled_model
from jaxserve.start.loaded import Loaded
from jaxserve.text.tokenizer import Tokenizer

HARD = "a" * 40 + "b"
SPLIT = {
    "type": "Split",
    "pattern": {"Regex": "(a+)+$"},
    "behavior": "Isolated",
    "invert": False,
}
STRIP = {"type": "Strip", "content": "a", "start": 0, "stop": 99}
CHAT = {"messages": [{"role": "user", "content": HARD}], "max_tokens": 2}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": HARD, "max_tokens": 2},
    "/v1/responses": {"input": HARD, "max_output_tokens": 16},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/tokenize": {"prompt": HARD},
}


@pytest.fixture
def serve(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., App]]:
    """Make an application whose tokenizer.json has other parts."""
    monkeypatch.setattr(loaded.runner, "close", lambda: None)
    engines: list[AsyncLLM] = []

    def make(**parts: Any) -> App:
        for path in bundled_model().glob("*token*"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        path = tmp_path / "tokenizer.json"
        fields = json.loads(path.read_text())
        path.write_text(json.dumps(fields | parts))
        for path in bundled_model().glob("*.jinja"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        assert loaded.tokenizer is not None
        tokenizer = Tokenizer(tmp_path, loaded.limits.vocab_size)
        engines.append(AsyncLLM(replace(loaded, tokenizer=tokenizer)))
        config = ServerConfig(health_timeout=0.2, drain_timeout=0.2)
        return App(Models([ServedModel(["demo"], "demo", engines[-1], config, b"s")]), config)

    yield make
    for engine in engines:
        engine.close()


def post(app: App, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async def ask() -> tuple[int, Any]:
        transport = httpx2.ASGITransport(app.asgi)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.post(path, json={"model": "demo"} | body, timeout=60)
            return answer.status_code, answer.json()

    return asyncio.run(ask())


def test_a_prompt_that_cannot_be_tokenized_is_refused_in_the_form_of_each_api(
    serve: Callable[..., App], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    app = serve(pre_tokenizer=SPLIT)
    for path, body in REQUESTS.items():
        for stream in (False, True):
            caplog.clear()
            status, answer = post(app, path, body | ({"stream": True} if stream else {}))
            error = answer["error"]
            assert status == 400 and "cannot encode" in error["message"], answer
            assert (answer["type"], error["type"]) == ("error", "invalid_request_error")
            [record] = [found for found in caplog.records if found.name.startswith("jaxserve.text")]
            assert record.exc_info is None and "\n" not in record.getMessage()
    assert "panicked" not in capfd.readouterr().err
    assert post(app, "/tokenize", {"prompt": "b"})[0] == 200


def test_tokens_that_cannot_be_decoded_end_their_request_alone(
    serve: Callable[..., App], caplog: pytest.LogCaptureFixture
) -> None:
    app = serve(decoder={"type": "Sequence", "decoders": [STRIP]})
    tokenizer = app.models.all[0].tokenizer()
    [bad], [good] = tokenizer.encode_word("a"), tokenizer.encode_word("b")
    body = {"prompt": [good], "max_tokens": 2, "ignore_eos": True}
    for _ in range(2):
        status, answer = post(app, "/v1/completions", body | {"allowed_token_ids": [bad]})
        assert status >= 400 and "detokenization failed" in answer["error"]["message"], answer
        status, answer = post(app, "/v1/completions", body | {"allowed_token_ids": [good]})
        assert (status, answer["choices"][0]["text"]) == (200, "bb"), answer
    assert not any(record.exc_info for record in caplog.records)
    status, answer = post(app, "/detokenize", {"tokens": [bad]})
    assert status == 400 and "cannot decode" in answer["error"]["message"]
    status, answer = post(app, "/v1/completions", body | {"prompt": [bad]})
    assert status == 500 and "index out of bounds" in answer["error"]["message"]
    assert post(app, "/v1/completions", body)[0] == 200
