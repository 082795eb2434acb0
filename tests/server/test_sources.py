"""What a server can be given as a model: a folder, a GGUF file, a name on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.engine.text.template_names import NAMED_TEMPLATES
from tests.engine.test_gguf_text import whole_model
from tests.support.checkpoint import save_checkpoint
from tests.support.hub_server import serve_hub
from tests.support.live_server import Server

SMALL = (
    "--port 0 --max-num-seqs 2 --max-num-batched-tokens 16 --decode-sizes 2 --token-sizes 16 "
    "--max-model-len 64 --num-gpu-blocks-override 20"
).split()


def test_files_and_names_are_served_as_folders_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint(tmp_path / "folder")
    (tmp_path / "gguf").mkdir()
    file, _ = whole_model(tmp_path / "gguf")
    held = {path.name: path.read_bytes() for path in folder.iterdir()}
    with serve_hub({"org/tiny": {"main": held}}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        models = [f"folder={folder}", f"file={file}", "org/tiny"]
        kept = ["--download-dir", str(tmp_path / "kept")]
        with Server([*models, *kept, *SMALL]) as server:
            names = [model["id"] for model in server.request("/v1/models").json()["data"]]
            assert names == ["folder", "file", "org/tiny"]
            texts = {}
            for name in names:
                body = {"model": name, "prompt": "abc", "max_tokens": 5, "temperature": 0}
                answer = server.request("/v1/completions", body).json()
                assert answer["usage"]["completion_tokens"] > 0
                texts[name] = answer["choices"][0]["text"]
    assert texts["org/tiny"] == texts["folder"]


def test_a_model_without_a_chat_template_says_what_serves_it(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    (folder / "chat_template.jinja").unlink()
    messages = [{"role": "user", "content": "a"}]
    with Server([str(folder), *SMALL]) as server:
        for path in ("/v1/chat/completions", "/v1/messages", "/tokenize"):
            answer = server.request(path, {"messages": messages, "max_tokens": 2})
            said, message = "this model has no chat template: send", answer.error["message"]
            assert answer.status == 400 and message.startswith(f"{said} a prompt to ")
            assert all(name in message for name in ("--chat-template", *NAMED_TEMPLATES))
        assert server.complete("a", 2).status == 200
    with Server([str(folder), *SMALL, "--skip-tokenizer-init"]) as server:
        answer = server.request("/v1/chat/completions", {"messages": messages})
        assert answer.status == 400 and "token ids to /v1/completions" in answer.error["message"]
