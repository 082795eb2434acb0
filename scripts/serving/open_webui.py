"""Open WebUI as a process, whose own endpoints are called as its page calls them."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from scripts.lib.server_process import free_port

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
        url: of the server that it calls.
        home: an empty folder for its files.
        key: of the server.
        model: of the server.
        question: of the chat.

    Raises:
        RuntimeError: it did not answer. The message has the end of its output.
    """
    port, log = free_port(), home / "log"
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "DATA_DIR": str(home), **_QUIET}
    environment |= {"OPENAI_API_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
    with log.open("w") as said:
        process = subprocess.Popen(
            [str(program), "serve", "--host", "127.0.0.1", "--port", str(port)],
            cwd=home,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            _chat(f"http://127.0.0.1:{port}", process, model, question)
        except (OSError, RuntimeError) as error:
            raise RuntimeError(f"{PACKAGE}: {error}\n{log.read_text()[-2000:]}") from error
        finally:
            process.terminate()
            process.wait()


def _chat(url: str, process: subprocess.Popen[bytes], model: str, question: str) -> None:
    end = time.monotonic() + SECONDS
    while True:
        try:
            _call(f"{url}/health", None, {})
            break
        except URLError as error:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("it does not start") from error
            time.sleep(1)
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
