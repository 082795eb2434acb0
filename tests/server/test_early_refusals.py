"""Requests to a full queue, refused before they are parsed: the answers and what follows them."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from jaxserve.server.http.app import App
from jaxserve.server.http.connection import Connection
from jaxserve.server.http.listener import bind, bind_path
from jaxserve.server.http.process import Process
from jaxserve.server.http.refused_clients import RefusedClient
from tests.server.conftest import Certificates
from tests.support.live_server import read_all

BODY = json.dumps({"prompt": [5], "max_tokens": 2, "temperature": 0}).encode()
SIZED = b"content-length: %d\r\n" % len(BODY)
JSON_BODY = b"content-type: application/json\r\n" + SIZED
KEYED = JSON_BODY + b"x-api-key: key\r\n"
SECONDS = 10.0
WAYS = ("at the door", "inside")


def post(
    headers: bytes = KEYED, path: bytes = b"/v1/completions", host: bytes = b"localhost"
) -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (path, host, headers)


class Serving(Process):
    """Server on a thread of this process, whose queue is full or is not."""

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self.app = app
        self.admission = app.models.all[0].admission
        self.early: list[bytes] = []
        self.loop: asyncio.AbstractEventLoop
        find = app.early_refusals.find

        def note(data: bytes, more_headers: Any) -> Any:
            found = find(data, more_headers)
            self.early += [data] if found is not None else []
            return found

        app.early_refusals.find = note
        self.fill()

    def fill(self) -> None:
        self.admission.num_live = self.admission.num_slots + self.admission.max_queued

    def empty(self) -> None:
        self.admission.num_live = 0

    def kinds(self) -> list[type]:
        return [type(connection) for connection in list(self.server_state.connections)]

    def peers(self) -> list[Any]:
        members = list(self.server_state.connections)
        return [member.client for member in members if isinstance(member, Connection)]

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the event loop, so that what comes meanwhile comes at once."""
        begun, end = threading.Event(), threading.Event()
        self.loop.call_soon_threadsafe(lambda: (begun.set(), end.wait(SECONDS)))
        begun.wait(SECONDS)
        try:
            yield
        finally:
            end.set()

    def wait_for(self, reached: Callable[[], bool]) -> None:
        pause = threading.Event()
        for _ in range(int(SECONDS / 0.01)):
            if reached():
                return
            pause.wait(0.01)
        raise AssertionError(f"connections: {self.kinds()}")


@contextmanager
def serving(app: App, listener: socket.socket) -> Iterator[Serving]:
    server = Serving(app)
    ready = threading.Event()

    async def run() -> None:
        server.loop = asyncio.get_running_loop()
        running = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.005)
        ready.set()
        await running

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert ready.wait(SECONDS)
    try:
        yield server
    finally:
        server.empty()
        for _ in range(2):
            server.handle_exit(15, None)
        thread.join(SECONDS)
        assert not thread.is_alive()


def connect(address: Any, family: int = socket.AF_INET) -> socket.socket:
    client = socket.socket(family)
    client.settimeout(SECONDS)
    client.connect(address)
    return client


@contextmanager
def sent(server: Serving, address: Any, data: bytes, way: str) -> Iterator[socket.socket]:
    """A connection that has sent some bytes before, or after it was accepted."""
    if way == "at the door":
        with server.stopped():
            client = connect(address)
            client.sendall(data)
    else:
        client = connect(address)
        server.wait_for(lambda: client.getsockname() in server.peers())
        client.sendall(data)
    with client:
        yield client


def read_answer(client: socket.socket) -> tuple[int, dict[str, Any], bytes]:
    """One answer with a length; of what differs between two of the same, the length."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = client.recv(1)
        assert piece, data
        data += piece
    begin, *lines = data.decode().strip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = b""
    while missing := int(headers.get("content-length", "0")) - len(body):
        body += client.recv(missing)
    varying = {name: len(headers.pop(name, "")) for name in ("date", "x-request-id")}
    return int(begin.split()[1]), headers | varying, body


def is_open(client: socket.socket) -> bool:
    with suppress(OSError):
        client.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\nx-api-key: key\r\n\r\n")
        return client.recv(9) == b"HTTP/1.1 "
    return False


# Requests, each with whether it is refused before it is parsed.
CASES = {
    "completions": (post() + BODY, True),
    "chat": (post(path=b"/v1/chat/completions") + BODY, True),
    "messages": (post(path=b"/v1/messages") + BODY, True),
    "responses": (post(path=b"/v1/responses") + BODY, True),
    "infill": (post(path=b"/infill") + BODY, True),
    "generate": (post(path=b"/inference/v1/generate") + BODY, True),
    "an alias": (post(path=b"/chat/completions") + BODY, True),
    "below the root path": (post(path=b"/llm/v1/completions") + BODY, True),
    "a query": (post(path=b"/v1/completions?version=1") + BODY, True),
    "no JSON": (post() + b"x" * len(BODY), True),
    "a request's id": (post(KEYED + b"X-Request-ID: \tabc de\t \r\n") + BODY, True),
    "a bearer": (post(JSON_BODY + b"Authorization: Bearer key\r\n") + BODY, True),
    "names and values as they come": (post(KEYED.upper().replace(b"KEY", b"key")) + BODY, True),
    "the client ends it": (post(KEYED + b"Connection: Close\r\n") + BODY, True),
    "the client keeps it": (post(KEYED + b"connection: keep-alive\r\n") + BODY, True),
    "another connection header": (post(KEYED + b"connection: te\r\n") + BODY, False),
    "a key that is wrong": (post(JSON_BODY + b"x-api-key: other\r\n") + BODY, False),
    "no key": (post(JSON_BODY) + BODY, False),
    "no JSON by its head": (post(SIZED + b"x-api-key: key\r\n") + BODY, False),
    "encoded": (post(KEYED + b"content-encoding: gzip\r\n") + BODY, False),
    "two keys": (post(KEYED + b"x-api-key: key\r\n") + BODY, False),
    "two lengths": (post(KEYED + SIZED) + BODY, False),
    "another host": (post(host=b"evil.example") + BODY, False),
    "two hosts": (post(KEYED + b"host: localhost\r\n") + BODY, False),
    "no host": (post().replace(b"host: localhost\r\n", b"") + BODY, False),
    "a page's origin": (post(KEYED + b"origin: http://app.example\r\n") + BODY, False),
    "chunked": (
        post(KEYED.replace(SIZED, b"transfer-encoding: chunked\r\n")) + b"1\r\nx\r\n0\r\n\r\n",
        False,
    ),
    "both lengths": (post(KEYED + b"transfer-encoding: chunked\r\n") + b"0\r\n\r\n", False),
    "no length": (post(KEYED.replace(SIZED, b"")), False),
    "a length that is none": (post(KEYED.replace(SIZED, b"content-length: +1\r\n")) + b"x", False),
    "HTTP/1.0": (post().replace(b"/1.1", b"/1.0") + BODY, False),
    "HTTP/1.2": (post().replace(b"/1.1", b"/1.2") + BODY, False),
    "an absolute target": (post(path=b"http://localhost/v1/completions") + BODY, False),
    "a folded header": (post(KEYED + b"x: a\r\n b\r\n") + BODY, False),
    "a header without a name": (post(KEYED + b": a\r\n") + BODY, False),
    "a space before the colon": (post(KEYED + b"x : a\r\n") + BODY, False),
    "a control character": (post(KEYED + b"x: \x01\r\n") + BODY, False),
    "lines that end otherwise": (post().replace(b"\r\n", b"\n") + BODY, False),
    "too many headers": (
        post(KEYED + b"".join(b"x%d: a\r\n" % n for n in range(100))) + BODY,
        False,
    ),
    "a long header": (post(KEYED + b"x: " + b"a" * (9 << 10) + b"\r\n") + BODY, False),
    "too large": (post(KEYED.replace(SIZED, b"content-length: 100000000\r\n")), False),
    "large": (post(KEYED.replace(SIZED, b"content-length: 100000\r\n")) + b"x" * 100_000, True),
    "another path": (post(path=b"/tokenize") + BODY, False),
    "a path that is none": (post(path=b"/v1/completions/") + BODY, False),
    "another method": (b"PUT" + post()[4:] + BODY, False),
    "health": (b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", False),
    "metrics": (b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx-api-key: key\r\n\r\n", False),
}


@pytest.fixture
def make(make_app: Callable[..., App]) -> Callable[..., App]:
    def make(**fields: Any) -> App:
        return make_app(api_key=("key",), **fields)

    return make


@pytest.mark.parametrize("way", WAYS)
def test_an_early_refusal_is_that_of_the_application(make: Callable[..., App], way: str) -> None:
    """Status, headers, body, what is counted, and whether the connection stays."""
    app = make(root_path="/llm", allowed_origins=("http://app.example",))
    is_full = app.early_refusals.is_full
    with bind("127.0.0.1", 0) as listener, serving(app, listener) as server:
        address = listener.getsockname()
        for name, (data, is_early) in CASES.items():
            seen = []
            for look in (is_full, lambda: False):
                app.early_refusals.is_full = look
                server.early.clear()
                refused = server.admission.num_refused
                with sent(server, address, data, way) as client:
                    answer = read_answer(client)
                    counted = server.admission.num_refused - refused
                    seen.append((answer, counted, is_open(client)))
                assert len(server.early) == (is_early and look is is_full), name
            assert seen[0] == seen[1], (name, seen)
            assert not is_early or seen[0][0][0] == 429, name


@pytest.mark.parametrize("way", WAYS)
def test_a_connection_stays_for_the_next_request(make: Callable[..., App], way: str) -> None:
    """Whole, in two parts, two at once, one of another kind; then there is room."""
    data = post() + BODY
    head, body = post(), BODY
    with bind("127.0.0.1", 0) as listener, ExitStack() as leave:
        server = leave.enter_context(serving(make(), listener))
        with sent(server, listener.getsockname(), data, way) as client:
            assert read_answer(client)[0] == 429
            kind = RefusedClient if way == "at the door" else Connection
            assert server.kinds() == [kind]
            client.sendall(head)
            assert read_answer(client)[0] == 429
            client.sendall(body + data + data + head + body[:3])
            assert [read_answer(client)[0] for _ in range(3)] == [429] * 3
            client.sendall(body[3:] + data)
            assert read_answer(client)[0] == 429
            assert server.kinds() == [kind] and len(server.early) == 6
            assert is_open(client)
            read_all_ready(client)
            server.empty()
            client.sendall(data)
            assert read_answer(client)[0] == 200
            server.fill()
            client.sendall(data)
            assert read_answer(client)[0] == 429
            assert server.kinds() == [Connection] and len(server.early) == 7


@pytest.mark.parametrize("way", WAYS)
def test_no_more_are_read_than_have_places(make: Callable[..., App], way: str) -> None:
    """Of twenty that come at once one has the last place; no other is parsed."""
    app, data = make(), post() + BODY
    with bind("127.0.0.1", 0) as listener, serving(app, listener) as server, ExitStack() as leave:
        address, admission = listener.getsockname(), server.admission
        admission.num_live -= 1
        clients = []
        if way == "inside":
            clients = [leave.enter_context(connect(address)) for _ in range(20)]
            server.wait_for(lambda: server.kinds() == [Connection] * 20)
        with server.stopped():
            for number in range(20):
                if way == "at the door":
                    clients.append(leave.enter_context(connect(address)))
                clients[number].sendall(data)
        assert sorted(read_answer(client)[0] for client in clients) == [200] + [429] * 19
        assert len(server.early) == 19 and admission.num_coming == 0
        assert admission.num_live == admission.num_slots + admission.max_queued - 1
        # What takes no place for long: bad bodies, late ones, wrong keys, clients that leave.
        for bad in (post() + b"x" * len(BODY), post() + BODY[:3], post(JSON_BODY) + BODY):
            with sent(server, address, bad, way) as client:
                assert bad.endswith(BODY[:3]) or read_answer(client)[0] in (400, 401)
                with sent(server, address, data, way) as good:
                    assert read_answer(good)[0] == 200
        with sent(server, address, data, way):
            pass
        server.wait_for(lambda: not server.app.models.all[0].active and not admission.num_coming)


def read_all_ready(client: socket.socket) -> None:
    """The rest of an answer whose beginning was read."""
    client.settimeout(0.5)
    with suppress(TimeoutError):
        while client.recv(1 << 16):
            pass
    client.settimeout(SECONDS)


@pytest.mark.parametrize("way", WAYS)
def test_a_body_that_is_dropped_gets_no_more_time(make: Callable[..., App], way: str) -> None:
    """A small one until the header's time is up, a large one for a moment; neither is kept."""
    app = make(header_timeout=0.4, keep_alive_timeout=SECONDS)
    with bind("127.0.0.1", 0) as listener, serving(app, listener) as server:
        for length in (b"1000", b"8000000"):
            head = post(KEYED.replace(SIZED, b"content-length: %b\r\n" % length))
            with sent(server, listener.getsockname(), head + b"x", way) as client:
                status, headers, _ = read_answer(client)
                assert status == 429 and ("connection" in headers) == (length != b"1000")
                with suppress(OSError):  # bytes that come one by one put nothing off
                    for _ in range(100):
                        client.sendall(b"x")
                        time.sleep(0.05)
                    raise AssertionError("still open")
            server.wait_for(lambda: not server.kinds())


@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_reads_late_gets_every_answer(make: Callable[..., App], way: str) -> None:
    count = 1000
    with (
        bind("127.0.0.1", 0) as listener,
        serving(make(send_buffer_bytes=4096), listener) as server,
    ):
        data = post() + BODY
        with sent(server, listener.getsockname(), data, way) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            rest = data * (count - 2) + data.replace(b"host:", b"connection: close\r\nhost:")
            sender = threading.Thread(target=client.sendall, args=(rest,))
            sender.start()
            server.wait_for(lambda: server.admission.num_refused > 1)
            answers = read_all(client)
            sender.join(SECONDS)
        assert answers.count(b"HTTP/1.1 429 ") == count == server.admission.num_refused


@pytest.mark.parametrize("way", WAYS)
def test_idle_connections_end(make: Callable[..., App], way: str) -> None:
    """In time, by their clients, and at once where the server stops."""
    data = post() + BODY
    with bind("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        with serving(make(keep_alive_timeout=0.3), listener) as server:
            with sent(server, address, data, way) as client:
                assert read_answer(client)[0] == 429 and client.recv(1) == b""
            with sent(server, address, data, way) as client:
                assert read_answer(client)[0] == 429
            server.wait_for(lambda: not server.kinds())
    with bind("127.0.0.1", 0) as listener, ExitStack() as leave:
        server = leave.enter_context(serving(make(keep_alive_timeout=SECONDS), listener))
        client = leave.enter_context(sent(server, listener.getsockname(), data, way))
        assert read_answer(client)[0] == 429
        server.handle_exit(15, None)
        assert client.recv(1) == b""
        server.wait_for(lambda: not server.kinds())


def test_refused_connections_count(make: Callable[..., App]) -> None:
    data = post() + BODY
    with bind("127.0.0.1", 0) as listener, serving(make(max_connections=2), listener) as server:
        address = listener.getsockname()
        with ExitStack() as leave:
            for way in WAYS:
                client = leave.enter_context(sent(server, address, data, way))
                assert read_answer(client)[0] == 429
            with sent(server, address, data, "at the door") as third:
                status, _, body = read_answer(third)
                assert status == 503 and b"too_many_connections" in body
        server.wait_for(lambda: not server.kinds())
        with sent(server, address, data, "at the door") as client:
            assert read_answer(client)[0] == 429 and server.kinds() == [RefusedClient]


def test_sockets_of_other_kinds(
    make: Callable[..., App], certificates: Certificates, tmp_path: Path
) -> None:
    data = post() + BODY
    path = str(tmp_path / "socket")
    with bind_path(path) as listener, serving(make(uds=path), listener) as server:
        with server.stopped():
            client = connect(path, socket.AF_UNIX)
            client.sendall(data)
        with client:
            assert read_answer(client)[0] == 429 and server.kinds() == [RefusedClient]
            assert is_open(client)
    app = make(ssl_certfile=str(certificates.server), ssl_keyfile=str(certificates.key))
    context = ssl.create_default_context(cafile=str(certificates.authority))
    with bind("127.0.0.1", 0) as listener, serving(app, listener) as server:
        plain = connect(listener.getsockname())
        with context.wrap_socket(plain, server_hostname="localhost") as client:
            for _ in range(2):
                client.sendall(data)
                assert read_answer(client)[0] == 429
            assert len(server.early) == 2 and is_open(client)


def test_only_what_is_full_refuses(make: Callable[..., App]) -> None:
    """A queue is full by completions or by prompt tokens; servers of two models never refuse so."""
    app = make()
    admission = app.models.all[0].admission
    assert not app.early_refusals.is_full()
    admission.num_prompt_tokens = admission.max_prompt_tokens
    assert app.early_refusals.is_full()
    admission.num_prompt_tokens -= 1
    assert not app.early_refusals.is_full()
    admission.num_live = admission.num_slots + admission.max_queued
    assert app.early_refusals.is_full()
    app.models.all *= 2
    assert not app.early_refusals.is_full()
    app.models.all.pop()
    app.lifecycle.is_draining = True
    assert not app.early_refusals.is_full()
    admission.num_live = admission.num_prompt_tokens = 0
