"""Where a server listens: Unix domain sockets and TLS."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxserve.commands.cli import main
from jaxserve.errors import InvalidRequest
from jaxserve.server.http.listener import allow_reuse, bind, bind_path
from jaxserve.server.settings import MAX_SOCKET_PATH, ServerConfig
from tests.server.conftest import Certificates
from tests.support.kept_programs import users_environment
from tests.support.live_server import ROOT, SMALL, read_all


class Secure(NamedTuple):
    path: Path
    log: Path
    certificates: Certificates

    def connect(self, with_certificate: bool = True) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=str(self.certificates.authority))
        if with_certificate:
            context.load_cert_chain(self.certificates.client, self.certificates.client_key)
        plain = socket.socket(socket.AF_UNIX)
        plain.settimeout(60)
        plain.connect(str(self.path))
        return context.wrap_socket(plain, server_hostname="localhost")

    def request(self, path: str, body: object = None) -> tuple[bytes, bytes]:
        data = b"" if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: s.sock\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        with self.connect() as one:
            one.sendall(head.encode() + data)
            answer, _, rest = read_all(one).partition(b"\r\n\r\n")
        return answer, rest


@pytest.fixture(scope="module")
def secure(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("socket")
    path, log = folder / "s", folder / "log"
    with socket.socket(socket.AF_UNIX) as left:  # as after a killed server
        left.bind(str(path))
    given = (
        *("--uds", path, "--ssl-certfile", certificates.server, "--ssl-keyfile", certificates.key),
        *("--ssl-ca-certs", certificates.authority, "--ssl-cert-reqs", "2"),
        *("--header-timeout", "1.5", "--host", "0.0.0.0", "--verbose"),
    )
    words = [sys.executable, "-m", "jaxserve", "serve", *SMALL, *map(str, given)]
    with log.open("w") as file:
        process = subprocess.Popen(words, cwd=ROOT, env=users_environment(), stderr=file)
    while f"ready at unix:{path}" not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    yield Secure(path, log, certificates)
    process.terminate()
    assert process.wait(60) == 0
    assert not path.exists()


def test_of_two_servers_that_start_at_one_address_the_second_ends_at_once() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0"):
            message = rf"cannot listen on {host}:{port}: Address already in use"
            with pytest.raises(OSError, match=message):
                bind(host, port)
        allow_reuse(first)
        first.listen()
        with pytest.raises(OSError, match="Address already in use"):
            bind("127.0.0.1", port)
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = first.accept()
            accepted.close()  # first: the port remembers the connection for a minute
            assert client.recv(1) == b""
    with bind("127.0.0.1", port) as again:
        allow_reuse(again)
        again.listen()


def sing(secure: Secure) -> bytes:
    head, body = secure.request(
        "/v1/completions", {"prompt": "Reverse: s-t-o-n-e", "max_tokens": 8, "temperature": 0}
    )
    assert head.startswith(b"HTTP/1.1 200"), head
    return json.loads(body)["choices"][0]["text"]


def test_requests_over_tls_and_a_socket(secure: Secure) -> None:
    before = sing(secure)
    body = {"prompt": "a", "max_tokens": 40, "ignore_eos": True, "stream": True}
    head, events = secure.request("/v1/completions", body)
    assert head.startswith(b"HTTP/1.1 200") and events.count(b"data: ") >= 2
    assert events.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    # A client without a certificate, one that speaks no TLS, and one that stays silent.
    with suppress(OSError), secure.connect(with_certificate=False) as one:
        one.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert one.recv(100) == b""
    with socket.socket(socket.AF_UNIX) as plain, socket.socket(socket.AF_UNIX) as silent:
        for one in (plain, silent):
            one.settimeout(30)
            one.connect(str(secure.path))
        plain.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"HTTP/1.1 200" not in read_all(plain)
        started = time.monotonic()
        assert read_all(silent) == b"" and time.monotonic() - started < 20
    # One whose reader is gone, in the middle of an answer.
    with secure.connect() as one:
        data = json.dumps(body | {"max_tokens": 600}).encode()
        one.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)
        )
        assert one.recv(100)
    assert sing(secure) == before
    log = secure.log.read_text()
    assert '"level": "error"' not in log
    # --verbose tells the start to the byte.
    assert "KV cache in float32, 41 pages x 32,768 = 1,343,488 bytes (640 tokens)" in log
    assert "buckets: decode 8; tokens 128" in log and "jaxserve: limits: " not in log


def test_a_socket_is_not_taken_from_another_server(secure: Secure, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="another server listens there"), bind_path(str(secure.path)):
        pass
    file = tmp_path / "file"
    file.write_text("kept")
    with pytest.raises(OSError, match="no socket"), bind_path(str(file)):
        pass
    assert file.read_text() == "kept"
    assert main(["serve", "--uds", str(file)]) == 2
    with pytest.raises(OSError, match="No such file"), bind_path(str(tmp_path / "a/b")):
        pass


BAD = {
    "no certificate": (["--ssl-keyfile", "KEY"], "--ssl-keyfile needs --ssl-certfile"),
    "no file": (["--ssl-certfile", "/no/such"], "--ssl-certfile: cannot read /no/such: No such"),
    "no key in it": (["--ssl-certfile", "SERVER"], "--ssl-certfile: SERVER is no private key"),
    "another's key": (
        ["--ssl-certfile", "SERVER", "--ssl-keyfile", "CLIENT"],
        "--ssl-keyfile: CLIENT is no private key without a password, in PEM, that belongs to",
    ),
    "a locked key": (
        ["--ssl-certfile", "SERVER", "--ssl-keyfile", "LOCKED"],
        "--ssl-keyfile: LOCKED is no private key without a password",
    ),
    "no authority": (
        ["--ssl-certfile", "SERVER", "--ssl-keyfile", "KEY", "--ssl-ca-certs", "KEY"],
        "--ssl-ca-certs: KEY holds no certificates in PEM",
    ),
    "no cipher": (
        ["--ssl-certfile", "SERVER", "--ssl-keyfile", "KEY", "--ssl-ciphers", "none:such"],
        "--ssl-ciphers: OpenSSL has no cipher 'none:such'",
    ),
    "nobody to sign": (
        ["--ssl-certfile", "SERVER", "--ssl-cert-reqs", "2"],
        "--ssl-cert-reqs needs --ssl-ca-certs",
    ),
    "no kind of demand": (["--ssl-cert-reqs", "3"], "--ssl-cert-reqs must be from 0 to 2"),
    "no path": (["--root-path", "llm"], "--root-path must be like /llm, got 'llm'"),
    "a path with an end": (["--root-path", "/llm/"], "--root-path must be like /llm"),
    "too long a socket": (["--uds", "/" + "x" * MAX_SOCKET_PATH], "uds must have 1 to 107 bytes"),
    "no template": (
        ["--chat-template", "llama9"],
        "--chat-template: 'llama9' is neither a template",
    ),
    "a bad template": (["--chat-template", "{% for %}"], "--chat-template: Expected"),
    "reserved inputs": (
        ["--default-chat-template-kwargs", '{"tools": []}'],
        "--default-chat-template-kwargs may not hold 'tools'",
    ),
    "no object": (
        ["--default-chat-template-kwargs", "[1]"],
        "argument --default-chat-template-kwargs: '[1]' must be an object",
    ),
    "no efforts": (
        ["--reasoning-effort-map", '{"a": 1}'],
        "--reasoning-effort-map must hold texts",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_setting_is_named(
    case: str, certificates: Certificates, capfd: pytest.CaptureFixture
) -> None:
    words, message = BAD[case]
    names = {
        "SERVER": certificates.server,
        "KEY": certificates.key,
        "CLIENT": certificates.client_key,
        "LOCKED": certificates.locked_key,
    }
    for name, path in names.items():
        message = message.replace(name, str(path))
    try:
        code = main(["serve", *(str(names.get(word, word)) for word in words)])
    except SystemExit as ended:
        code = ended.code
    out, err = capfd.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert message in err


def test_a_socket_is_local() -> None:
    assert ServerConfig(host="0.0.0.0", uds="/tmp/x").is_local
    with pytest.raises(InvalidRequest, match="host"):
        ServerConfig(host="0.0.0.0")
