"""The few endpoints of the Hugging Face hub that a download needs, on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

# Models by name, their revisions, and their files.
Models = Mapping[str, Mapping[str, Mapping[str, bytes]]]


def commit_of(repo: str, revision: str) -> str:
    return hashlib.sha1(f"{repo}@{revision}".encode()).hexdigest()


@dataclass
class Hub:
    url: str
    asked: list[str] = field(default_factory=list)


class _Answer(BaseHTTPRequestHandler):
    models: Models
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(path)
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if api else parts[:2])
        rest = parts[4:] if api else parts[2:]
        if repo == "org/gated":
            return self.fail(403, "GatedRepo")
        if repo not in self.models:
            return self.fail(404, "RepoNotFound")
        revisions = {commit_of(repo, name): files for name, files in self.models[repo].items()}
        named = {name: commit_of(repo, name) for name in self.models[repo]}
        asked = rest[1] if len(rest) > 1 else "main"
        commit = asked if asked in revisions else named.get(asked)
        if commit is None:
            return self.fail(404, "RevisionNotFound")
        files = revisions[commit]
        if not api:
            return self.send_file(files, "/".join(rest[2:]), commit)
        listed = [
            {
                "type": "file",
                "path": name,
                "size": len(content),
                "oid": hashlib.sha1(content).hexdigest(),
            }
            for name, content in files.items()
        ]
        if rest[:1] == ["tree"]:
            return self.reply(json.dumps(listed).encode(), {})
        siblings = [{"rfilename": name, "size": len(files[name])} for name in files]
        return self.reply(
            json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode(), {}
        )

    def send_file(self, files: Mapping[str, bytes], name: str, commit: str) -> None:
        if name not in files:
            return self.fail(404, "EntryNotFound")
        digest = hashlib.sha1(files[name]).hexdigest()
        return self.reply(files[name], {"ETag": f'"{digest}"', "X-Repo-Commit": commit})

    def reply(self, body: bytes, headers: Mapping[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def fail(self, status: int, code: str) -> None:
        self.reply(b"{}", {"X-Error-Code": code}, status)


@contextmanager
def serve_hub(models: Models) -> Iterator[Hub]:
    """Serve a hub with these models until the block ends."""
    answer = type("Answer", (_Answer,), {"models": models})
    server = ThreadingHTTPServer(("127.0.0.1", 0), answer)
    answer.hub = hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
