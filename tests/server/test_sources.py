"""The kinds of model that a server accepts: a folder, a GGUF file, a name on the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.text import NAMED_TEMPLATES
from tests.engine.test_gguf_text import whole_model
from tests.support.checkpoint import save_checkpoint
from tests.support.hub_server import serve_hub
from tests.support.live_server import Server

SMALL = (
    "--port 0 --max-num-seqs 2 --max-num-batched-tokens 16 --decode-sizes 2 --token-sizes 16 "
    "--max-model-len 64 --num-gpu-blocks-override 20"
).split()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server of every kind of source, and of a folder without a chat template."""
    path = tmp_path_factory.mktemp("sources")
    folder = save_checkpoint(path / "folder")
    plain = save_checkpoint(path / "plain")
    (plain / "chat_template.jinja").unlink()
    (path / "gguf").mkdir()
    file, _ = whole_model(path / "gguf")
    held = {path.name: path.read_bytes() for path in folder.iterdir()}
    with serve_hub({"org/tiny": {"main": held}}) as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        models = [f"folder={folder}", f"file={file}", "org/tiny", f"plain={plain}"]
        kept = ["--download-dir", str(path / "kept")]
        with Server([*models, *kept, *SMALL]) as server:
            yield server


def test_files_and_names_are_served_as_folders_are(sources: Server) -> None:
    names = [model["id"] for model in sources.request("/v1/models").json()["data"]]
    assert names == ["folder", "file", "org/tiny", "plain"]
    texts = {}
    for name in names:
        body = {"model": name, "prompt": "abc", "max_tokens": 5, "temperature": 0}
        answer = sources.request("/v1/completions", body).json()
        assert answer["usage"]["completion_tokens"] > 0
        texts[name] = answer["choices"][0]["text"]
    assert texts["org/tiny"] == texts["folder"] == texts["plain"]


def test_a_model_without_a_chat_template_says_what_serves_it(sources: Server) -> None:
    messages = [{"role": "user", "content": "a"}]
    for path in ("/v1/chat/completions", "/v1/messages", "/tokenize"):
        asked = {"model": "plain", "messages": messages, "max_tokens": 2}
        answer = sources.request(path, asked)
        said, message = "this model has no chat template: send", answer.error["message"]
        assert answer.status == 400 and message.startswith(f"{said} a prompt to ")
        assert all(name in message for name in ("--chat-template", *NAMED_TEMPLATES))
    assert sources.complete("a", 2, model="plain").status == 200


def test_a_model_without_a_tokenizer_says_what_serves_it(tmp_path: Path) -> None:
    with Server([str(save_checkpoint(tmp_path)), *SMALL, "--skip-tokenizer-init"]) as server:
        messages = [{"role": "user", "content": "a"}]
        answer = server.request("/v1/chat/completions", {"messages": messages})
        assert answer.status == 400 and "token ids to /v1/completions" in answer.error["message"]
