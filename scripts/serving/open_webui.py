"""Open WebUI as a process, whose own endpoints are called as its page calls them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from scripts.lib.server_process import Serving, free_port

PACKAGE = "open-webui==0.12.4"
SECONDS = 1200  # until it answers, and of an answer
# Tasks that follow the answer of a chat, by name.
TASKS = ("title", "tags", "follow_up")
# It neither fetches anything nor loads a model of its own.
_QUIET = {
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "x",
    "ENABLE_OLLAMA_API": "False",
    "OFFLINE_MODE": "True",
    "HF_HUB_OFFLINE": "1",
    "RAG_EMBEDDING_ENGINE": "openai",
    "ANONYMIZED_TELEMETRY": "False",
    "DO_NOT_TRACK": "true",
    "SCARF_NO_ANALYTICS": "true",
}


def chat_with_open_webui(
    program: Path, url: str, home: Path, key: str, model: str, question: str
) -> None:
    """Start Open WebUI over a server, send it one chat with its tasks, and end it.

    Args:
        program: `open-webui` as it is installed.
        home: an empty folder for its files.

    Raises:
        RuntimeError: it did not answer. The message has the end of its output.
    """
    port = str(free_port())
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "DATA_DIR": str(home), **_QUIET}
    environment |= {"OPENAI_API_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
    command = [str(program), "serve", "--host", "127.0.0.1", "--port", port]
    address = f"http://127.0.0.1:{port}"
    with Serving(command, address, environment=environment, folder=home, start_s=SECONDS) as server:
        try:
            _chat(address, model, question)
        except (OSError, RuntimeError) as error:
            raise RuntimeError(f"{PACKAGE}: {error}\n{server.log()[-2000:]}") from error


def _chat(url: str, model: str, question: str) -> None:
    # Without accounts there is one user, who has this name.
    user = {"email": "admin@localhost", "password": "admin"}
    token = json.loads(_call(f"{url}/api/v1/auths/signin", user, {}))["token"]
    allowed = {"authorization": f"Bearer {token}"}
    listed = json.loads(_call(f"{url}/api/models", None, allowed))
    if model not in [entry["id"] for entry in listed["data"]]:
        raise RuntimeError(f"it lists {listed['data']}")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    chat: dict[str, Any] = {"model": model, "messages": messages}
    _call(f"{url}/api/chat/completions", {**chat, "stream": True}, allowed)
    _call(f"{url}/api/chat/completions", {**chat, "stream": False}, allowed)
    for task in TASKS:
        _call(f"{url}/api/v1/tasks/{task}/completions", chat, allowed)


def _call(url: str, body: dict[str, Any] | None, headers: dict[str, str]) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"content-type": "application/json", **headers})
    with urlopen(request, timeout=SECONDS) as answer:
        return answer.read()
