"""Record the requests of clients to our server. Fail where one cannot read its answers.

Claude Code and Codex come by npm, Open WebUI by pip, into a folder that is deleted afterwards. Each
sends a small random model one question, without a terminal, through a proxy that keeps its
requests. The first answer to a coding agent is a call from this file, since a random model makes no
calls: the agent runs its tool, and sends the result to the model. The shape of each request is
written into `tests/clients/recorded`: names of fields, types and tools, with "x" in the place of
every text. A test sends it again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from scripts.lib.argument_types import script_parser
from scripts.lib.paths import ROOT
from scripts.lib.random_checkpoint import FIRST_ORDINARY_ID, random_checkpoint
from scripts.lib.run_main import end_at_sigterm, run_main
from scripts.lib.server_process import Server
from scripts.serving.open_webui import PACKAGE, chat_with_open_webui

RECORDED = ROOT / "tests" / "clients" / "recorded"
MODEL, QUESTION, KEY = "small", "Say hello.", "a-client-key"
OPEN_WEBUI = "open_webui"
SECONDS = 600  # of a download, and of a client's run
PIP_SECONDS = 3600  # of Open WebUI, which takes 7 GB with its requirements
ROOM = 32768  # tokens: theirs are thousands, and Codex takes an answer of any length
CODEX = """model = "{model}"
model_provider = "jaxserve"
[model_providers.jaxserve]
name = "jaxserve"
base_url = "{url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}<s>{{ message.role }} {{ message.content }}</s>{% endfor %}"
)
# Texts that are part of the form, by the name of their field. All others become "x".
FORMS = {"type", "role", "name", "effort", "summary", "tool_choice", "$schema", "required", "keep"}
FORMS |= {"include", "enum", "format", "verbosity", "ttl", "status", "detail", "syntax"}
TOOLS = 1  # kept of each type


@dataclass(frozen=True)
class Client:
    """A client that is a package of npm.

    Attributes:
        package: its name and version.
        command: of its run, without a terminal.
        environment: its variables. `{url}` is the server's.
        path: of the requests that it draws answers with.
        call: events of a call, which answer the first request that has tools.
        files: that it reads, by path in its home.
    """

    package: str
    command: tuple[str, ...]
    environment: dict[str, str]
    path: str
    call: tuple[dict[str, Any], ...]
    files: dict[str, str] = field(default_factory=dict)


USAGE = {"input_tokens": 1, "output_tokens": 1}
CLAUDE_CALL: tuple[dict[str, Any], ...] = (
    {
        "type": "message_start",
        "message": {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": USAGE,
        },
    },
    {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {}},
    },
    {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "input_json_delta", "partial_json": '{"command": "echo hello"}'},
    },
    {"type": "content_block_stop", "index": 0},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": USAGE,
    },
    {"type": "message_stop"},
)
CODEX_ITEM = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "call_1",
    "status": "completed",
    "name": "exec_command",
    "arguments": '{"cmd": "echo hello"}',
}
CODEX_CALL: tuple[dict[str, Any], ...] = (
    {"type": "response.created", "response": {"id": "resp_1"}},
    {"type": "response.output_item.done", "output_index": 0, "item": CODEX_ITEM},
    {
        "type": "response.completed",
        "response": {"id": "resp_1", "usage": {**USAGE, "total_tokens": 2}},
    },
)
CLIENTS = {
    "claude_code": Client(
        "@anthropic-ai/claude-code@2.1.197",
        ("claude", "-p", QUESTION, "--model", MODEL, "--allowedTools", "Bash(echo:*)"),
        {
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        "/v1/messages",
        CLAUDE_CALL,
    ),
    "codex": Client(
        "@openai/codex@0.171.0",
        ("codex", "exec", "--skip-git-repo-check", QUESTION),
        {"OPENAI_API_KEY": KEY},
        "/v1/responses",
        CODEX_CALL,
        {".codex/config.toml": CODEX},
    ),
}


def main() -> int:
    """Record each client that is asked for. Return 1 where one was refused."""
    parser = script_parser("scripts.serving.record_clients", __doc__)
    names = [*CLIENTS, OPEN_WEBUI]
    parser.add_argument("clients", nargs="*", choices=[*names, []], metavar="CLIENT", default=[])
    parser.add_argument("--npm", metavar="FOLDER", type=Path, help="where npm installed them")
    parser.add_argument("--open-webui", metavar="PATH", type=Path, help="the installed program")
    arguments = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _server(folder) as url:
            for client in arguments.clients or names:
                home = folder / client
                home.mkdir()
                if client == OPEN_WEBUI:
                    package = PACKAGE
                    exchanges = run_open_webui(url, home, arguments.open_webui)
                else:
                    package = CLIENTS[client].package
                    exchanges = run_client(CLIENTS[client], url, home, arguments.npm)
                failed |= not _write(client, package, exchanges)
    return int(failed)


@contextmanager
def _server(folder: Path) -> Iterator[str]:
    """Serve a random model that takes prompts as long as theirs."""
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    checkpoint = random_checkpoint("tiny", folder)
    # As many tokens as may end an answer do: it is some dozens of words long.
    ends = {"eos_token_id": list(range(FIRST_ORDINARY_ID, 1008, 32))}
    (checkpoint / "generation_config.json").write_text(json.dumps(ends))
    with Server(
        *(str(checkpoint), "--served-model-name", MODEL),
        *("--chat-template", str(template), "--api-key", KEY, "--max-num-seqs", "2"),
        *("--max-model-len", str(ROOM), "--allow-long-max-model-len"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ) as server:
        yield server.url


def run_client(client: Client, url: str, home: Path, npm: Path | None) -> list[dict[str, Any]]:
    """Run a client to its end. Return its requests and their answers.

    Raises:
        RuntimeError: it ended with an error. The message has its output.
    """
    installed = npm or home
    if npm is None:
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(home)]
        subprocess.run([*command, client.package], check=True, timeout=SECONDS)
    with _proxy(url, client) as (to, exchanges):
        for path, text in client.files.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(text.format(url=to, model=MODEL))
        program, *rest = client.command
        ended = subprocess.run(
            [str(installed / "node_modules" / ".bin" / program), *rest],
            cwd=home,
            env={"PATH": os.environ["PATH"], "HOME": str(home)}
            | {name: value.format(url=to) for name, value in client.environment.items()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
    if ended.returncode:
        raise RuntimeError(f"{client.package}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return exchanges


def run_open_webui(url: str, home: Path, program: Path | None) -> list[dict[str, Any]]:
    """Send a chat by Open WebUI. Return its requests and their answers.

    Raises:
        RuntimeError: it did not answer.
    """
    if program is None:
        venv = home / "venv"
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=SECONDS)
        install = [str(venv / "bin" / "pip"), "install", "--quiet", PACKAGE]
        subprocess.run(install, check=True, timeout=PIP_SECONDS)
        program = venv / "bin" / "open-webui"
    with _proxy(url) as (to, exchanges):
        chat_with_open_webui(program, to, home, KEY, MODEL, QUESTION)
    return exchanges


@contextmanager
def _proxy(url: str, client: Client | None = None) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Pass requests on to a server, and keep them with the status of their answers.

    The first request of a client with tools is answered by the client's call.
    """
    exchanges: list[dict[str, Any]] = []
    calls = [] if client is None else [client]

    class Relay(BaseHTTPRequestHandler):
        def relay(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            if calls and self.path.startswith(calls[0].path) and json.loads(body).get("tools"):
                self.answer_with(calls.pop().call)
                self.keep(body, 200)
                return
            left_out = {"host", "content-length", "accept-encoding", "connection"}
            headers = {k: v for k, v in self.headers.items() if k.lower() not in left_out}
            try:
                answer = urlopen(
                    Request(url + self.path, body or None, headers, method=self.command),
                    timeout=SECONDS,
                )
            except HTTPError as error:
                answer = error
            with answer:
                self.send_response(answer.status)
                self.send_header("content-type", answer.headers.get("content-type", ""))
                self.end_headers()
                while part := answer.read1(1 << 16):
                    self.wfile.write(part)
                    self.wfile.flush()
            self.keep(body, answer.status)

        def answer_with(self, events: tuple[dict[str, Any], ...]) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for event in events:
                self.wfile.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())

        def keep(self, body: bytes, status: Any) -> None:
            asked = {"method": self.command, "path": self.path, "status": status}
            beta = self.headers.get("anthropic-beta")
            asked["headers"] = {} if beta is None else {"anthropic-beta": beta}
            exchanges.append(asked | {"body": json.loads(body) if body else None})

        do_GET = do_HEAD = do_POST = relay

        def log_message(self, *_: object) -> None:
            """Write no log."""

    relay = ThreadingHTTPServer(("127.0.0.1", 0), Relay)
    threading.Thread(target=relay.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{relay.server_port}", exchanges
    finally:
        relay.shutdown()
        relay.server_close()


def shape_of(value: Any, name: str = "") -> Any:
    """Return a request's part with "x" in the place of texts that are not part of the form."""
    if isinstance(value, dict):
        # Descriptions of tools stay. Descriptions of parameters are no part of the form.
        left_out = () if {"parameters", "input_schema", "tools"} & set(value) else ("description",)
        return {
            key: shape_of(part, key)
            for key, part in value.items()
            if key not in left_out or not isinstance(part, str)
        }
    if isinstance(value, list):
        return [shape_of(part, name) for part in _first_of_each(value)]
    if isinstance(value, str):
        if name == "arguments":
            return "{}"
        return value if name in FORMS or name == "model" else "x"
    return value


def _first_of_each(parts: list[Any]) -> list[Any]:
    kept: list[Any] = []
    seen: dict[str, int] = {}
    for part in parts:
        if isinstance(part, dict) and ("input_schema" in part or "parameters" in part):
            kind = str(part.get("type"))
            seen[kind] = seen.get(kind, 0) + 1
            if seen[kind] > TOOLS:
                continue
        kept.append(part)
    return kept


def _write(client: str, package: str, exchanges: list[dict[str, Any]]) -> bool:
    """Write the shapes of a client's requests. Return whether all of them were answered."""
    refused = [exchange for exchange in exchanges if exchange["status"] != 200]
    for exchange in refused:
        print(f"{client}: {exchange['path']}: {exchange['status']}", file=sys.stderr)
    rows = [
        {key: exchange[key] for key in ("method", "path", "headers")}
        | {"body": shape_of(exchange["body"])}
        for exchange in exchanges
    ]
    RECORDED.mkdir(exist_ok=True)
    record = {"client": package, "requests": rows}
    (RECORDED / f"{client}.json").write_text(json.dumps(record, indent=1) + "\n")
    return not refused and any(exchange["body"] for exchange in exchanges)


if __name__ == "__main__":
    end_at_sigterm()
    run_main(main)
