"""Requests to a full queue: refusals before the HTTP parser, and the connections after them."""

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

from jaxserve.errors import Overloaded
from jaxserve.server.http import early_refusals
from jaxserve.server.http.app import App
from jaxserve.server.http.connection import Connection
from jaxserve.server.http.listener import bind, bind_path
from jaxserve.server.http.process import Process
from jaxserve.server.http.refused_clients import RefusedClient
from jaxserve.server.schema.errors import ApiError
from tests.server.conftest import Certificates
from tests.support.live_server import read_all

BODY = json.dumps({"prompt": [5], "max_tokens": 2, "temperature": 0}).encode()
SIZED = b"content-length: %d\r\n" % len(BODY)
JSON_BODY = b"content-type: application/json\r\n" + SIZED
KEYED = JSON_BODY + b"x-api-key: key\r\n"
SECONDS = 10.0
# Where requests to a full queue are refused.
ON_SOCKET, ON_CONNECTION, IN_APPLICATION = "on the socket", "on a connection", "in the application"
WAYS = (ON_SOCKET, ON_CONNECTION, IN_APPLICATION)


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
            refusal = find(data, more_headers)
            self.early += [data] if refusal is not None else []
            return refusal

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
        """Stop the event loop, so that messages sent meanwhile arrive at once."""
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
    """Yield a connection that has sent `data` before it was accepted, or after, by `way`."""
    if way == IN_APPLICATION:
        server.app.early_refusals.is_full = lambda: False
    if way == ON_SOCKET:
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
    """Read one answer; return its status, its headers and its body.

    Headers that vary between two equal answers have their length as value.
    """
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


# Requests, each with the status of its answer while the queue is full.
CASES = {
    "completions": (post() + BODY, 429),
    "chat": (post(path=b"/v1/chat/completions") + BODY, 429),
    "messages": (post(path=b"/v1/messages") + BODY, 429),
    "responses": (post(path=b"/v1/responses") + BODY, 429),
    "infill": (post(path=b"/infill") + BODY, 429),
    "generate": (post(path=b"/inference/v1/generate") + BODY, 429),
    "an alias": (post(path=b"/chat/completions") + BODY, 429),
    "below the root path": (post(path=b"/llm/v1/completions") + BODY, 429),
    "a query": (post(path=b"/v1/completions?version=1") + BODY, 429),
    "no JSON": (post() + b"x" * len(BODY), 429),
    "a request's id": (post(KEYED + b"X-Request-ID: \tabc de\t \r\n") + BODY, 429),
    "a bearer": (post(JSON_BODY + b"Authorization: Bearer key\r\n") + BODY, 429),
    "names and values as they come": (post(KEYED.upper().replace(b"KEY", b"key")) + BODY, 429),
    "the client ends it": (post(KEYED + b"Connection: Close\r\n") + BODY, 429),
    "the client keeps it": (post(KEYED + b"connection: keep-alive\r\n") + BODY, 429),
    "another connection header": (post(KEYED + b"connection: te\r\n") + BODY, 429),
    "a key that is wrong": (post(JSON_BODY + b"x-api-key: other\r\n") + BODY, 401),
    "no key": (post(JSON_BODY) + BODY, 401),
    "no JSON by its head": (post(SIZED + b"x-api-key: key\r\n") + BODY, 415),
    "encoded": (post(KEYED + b"content-encoding: gzip\r\n") + BODY, 415),
    "two keys": (post(KEYED + b"x-api-key: key\r\n") + BODY, 401),
    "two lengths": (post(KEYED + SIZED) + BODY, 429),
    "another host": (post(host=b"evil.example") + BODY, 403),
    "two hosts": (post(KEYED + b"host: localhost\r\n") + BODY, 400),
    "no host": (post().replace(b"host: localhost\r\n", b"") + BODY, 400),
    "a page's origin": (post(KEYED + b"origin: http://app.example\r\n") + BODY, 429),
    "chunked": (
        post(KEYED.replace(SIZED, b"transfer-encoding: chunked\r\n")) + b"1\r\nx\r\n0\r\n\r\n",
        429,
    ),
    "both lengths": (post(KEYED + b"transfer-encoding: chunked\r\n") + b"0\r\n\r\n", 400),
    "no length": (post(KEYED.replace(SIZED, b"")), 429),
    "a length that is none": (post(KEYED.replace(SIZED, b"content-length: +1\r\n")) + b"x", 400),
    "HTTP/1.0": (post().replace(b"/1.1", b"/1.0") + BODY, 429),
    "HTTP/1.2": (post().replace(b"/1.1", b"/1.2") + BODY, 400),
    "an absolute target": (post(path=b"http://localhost/v1/completions") + BODY, 429),
    "a folded header": (post(KEYED + b"x: a\r\n b\r\n") + BODY, 400),
    "a header without a name": (post(KEYED + b": a\r\n") + BODY, 400),
    "a space before the colon": (post(KEYED + b"x : a\r\n") + BODY, 400),
    "a control character": (post(KEYED + b"x: \x01\r\n") + BODY, 429),
    "lines that end otherwise": (post().replace(b"\r\n", b"\n") + BODY, 429),
    "too many headers": (
        post(KEYED + b"".join(b"x%d: a\r\n" % n for n in range(100))) + BODY,
        431,
    ),
    "a long header": (post(KEYED + b"x: " + b"a" * (9 << 10) + b"\r\n") + BODY, 431),
    "too large": (post(KEYED.replace(SIZED, b"content-length: 100000000\r\n")), 429),
    "large": (post(KEYED.replace(SIZED, b"content-length: 100000\r\n")) + b"x" * 100_000, 429),
    "another path": (post(path=b"/tokenize") + BODY, 400),
    "a path that is none": (post(path=b"/v1/completions/") + BODY, 404),
    "another method": (b"PUT" + post()[4:] + BODY, 405),
    "health": (b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", 200),
    "metrics": (b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx-api-key: key\r\n\r\n", 200),
}
# Requests with unusual heads, which are refused by the application.
UNUSUAL = (
    "another connection header",
    "two lengths",
    "a page's origin",
    "chunked",
    "no length",
    "HTTP/1.0",
    "an absolute target",
    "a control character",
    "lines that end otherwise",
    "too large",
)
# Refusals after which the connection is closed: the body is unread, or the client wants it.
CLOSED = ("the client ends it", "chunked", "no length", "HTTP/1.0", "too large", "large")


@pytest.fixture
def make(make_app: Callable[..., App]) -> Callable[..., App]:
    def make(**fields: Any) -> App:
        return make_app(api_key=("key",), **fields)

    return make


@pytest.mark.parametrize("way", [ON_SOCKET, ON_CONNECTION])
def test_an_early_refusal_is_that_of_the_application(make: Callable[..., App], way: str) -> None:
    """Early refusals equal the application's in status, headers, body, counts and connection."""
    app = make(root_path="/llm", allowed_origins=("http://app.example",))
    is_full = app.early_refusals.is_full
    with bind("127.0.0.1", 0) as listener, serving(app, listener) as server:
        address = listener.getsockname()
        for name, (data, status) in CASES.items():
            is_early = status == 429 and name not in UNUSUAL
            seen = []
            for look in (is_full, lambda: False):
                app.early_refusals.is_full = look
                server.early.clear()
                refused = server.admission.num_refused
                with sent(server, address, data, way) as client:
                    answer = read_answer(client)
                    assert answer[0] == status, (name, answer)
                    assert server.admission.num_refused - refused == (status == 429), name
                    seen.append((answer, is_open(client)))
                assert len(server.early) == (is_early and look is is_full), name
            assert seen[0] == seen[1], (name, seen)
            if status == 429:
                check_refusal(name, data, *seen[0])


def check_refusal(
    name: str, data: bytes, answer: tuple[int, dict[str, Any], bytes], stays: bool
) -> None:
    _, headers, body = answer
    error = json.loads(body)["error"]
    assert error["code"] == "queue_full" and headers["retry-after"] == "1", name
    assert "completions are being served or waiting" in error["message"]
    assert headers["x-request-id"] == (5 if b"X-Request-ID" in data else 32)
    assert (headers.get("connection") != "close") == stays == (name not in CLOSED), name


@pytest.mark.parametrize("way", WAYS)
def test_a_connection_stays_for_the_next_request(make: Callable[..., App], way: str) -> None:
    """Sends requests whole, in two parts, and two at once, to a full and to an empty queue."""
    data, is_early = post() + BODY, way != IN_APPLICATION
    with bind("127.0.0.1", 0) as listener, ExitStack() as leave:
        server = leave.enter_context(serving(make(), listener))
        with sent(server, listener.getsockname(), data, way) as client:
            assert read_answer(client)[0] == 429
            kind = RefusedClient if way == ON_SOCKET else Connection
            assert server.kinds() == [kind]
            client.sendall(post())
            assert not is_early or read_answer(client)[0] == 429
            client.sendall(BODY + data + data + post() + BODY[:3])
            assert [read_answer(client)[0] for _ in range(3)] == [429] * 3
            client.sendall(BODY[3:] + data)
            assert [read_answer(client)[0] for _ in range(2 - is_early)] == [429] * (2 - is_early)
            assert server.kinds() == [kind] and len(server.early) == 6 * is_early
            assert is_open(client)
            read_all_ready(client)
            server.empty()
            client.sendall(data)
            assert read_answer(client)[0] == 200
            server.fill()
            client.sendall(data)
            assert read_answer(client)[0] == 429
            assert server.kinds() == [Connection] and len(server.early) == 7 * is_early


@pytest.mark.parametrize("way", WAYS)
def test_no_more_are_read_than_have_places(make: Callable[..., App], way: str) -> None:
    """Twenty requests arrive at once, and one gets the last place. Early, no other is parsed."""
    app, data = make(), post() + BODY
    with bind("127.0.0.1", 0) as listener, serving(app, listener) as server, ExitStack() as leave:
        address, admission = listener.getsockname(), server.admission
        admission.num_live -= 1
        if way == IN_APPLICATION:
            app.early_refusals.is_full = lambda: False
        clients = []
        if way != ON_SOCKET:
            clients = [leave.enter_context(connect(address)) for _ in range(20)]
            server.wait_for(lambda: server.kinds() == [Connection] * 20)
        with server.stopped():
            for number in range(20):
                if way == ON_SOCKET:
                    clients.append(leave.enter_context(connect(address)))
                clients[number].sendall(data)
        assert sorted(read_answer(client)[0] for client in clients) == [200] + [429] * 19
        assert len(server.early) == (0 if way == IN_APPLICATION else 19)
        assert admission.num_coming == 0
        assert admission.num_live == admission.num_slots + admission.max_queued - 1
        # Bad bodies, incomplete ones, wrong keys and clients that leave take no place.
        for bad in (post() + b"x" * len(BODY), post() + BODY[:3], post(JSON_BODY) + BODY):
            with sent(server, address, bad, way) as client:
                assert bad.endswith(BODY[:3]) or read_answer(client)[0] in (400, 401)
                with sent(server, address, data, way) as good:
                    assert read_answer(good)[0] == 200
        with sent(server, address, data, way):
            pass
        server.wait_for(lambda: not server.app.models.all[0].active and not admission.num_coming)


def read_all_ready(client: socket.socket) -> None:
    """Read the rest of an answer whose beginning was read."""
    client.settimeout(0.5)
    with suppress(TimeoutError):
        while client.recv(1 << 16):
            pass
    client.settimeout(SECONDS)


@pytest.mark.parametrize("way", WAYS)
def test_a_late_body_gets_no_more_time(make: Callable[..., App], way: str) -> None:
    """A large body is not read. A small one is read within the header's or the body's time.

    Early refusals are sent before the body arrives. The application reads a small body first.
    """
    app = make(header_timeout=0.4, body_timeout=0.4, keep_alive_timeout=SECONDS)
    with bind("127.0.0.1", 0) as listener, serving(app, listener) as server:
        for length in (b"1000", b"8000000"):
            head = post(KEYED.replace(SIZED, b"content-length: %b\r\n" % length))
            with sent(server, listener.getsockname(), head + b"x", way) as client:
                status, headers, _ = read_answer(client)
                is_read_first = way == IN_APPLICATION and length == b"1000"
                assert status == (408 if is_read_first else 429)
                closes = is_read_first or length != b"1000"
                assert headers.get("connection") == ("close" if closes else None)
                with suppress(OSError):  # single bytes do not extend the deadline
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
            for way in (ON_SOCKET, ON_CONNECTION):
                client = leave.enter_context(sent(server, address, data, way))
                assert read_answer(client)[0] == 429
            with sent(server, address, data, ON_SOCKET) as third:
                status, _, body = read_answer(third)
                assert status == 503 and b"too_many_connections" in body
        server.wait_for(lambda: not server.kinds())
        with sent(server, address, data, ON_SOCKET) as client:
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
        assert server.admission.num_refused == 1
    app = make(ssl_certfile=str(certificates.server), ssl_keyfile=str(certificates.key))
    context = ssl.create_default_context(cafile=str(certificates.authority))
    with bind("127.0.0.1", 0) as listener, serving(app, listener) as server:
        plain = connect(listener.getsockname())
        with context.wrap_socket(plain, server_hostname="localhost") as client:
            for _ in range(2):
                client.sendall(data)
                assert read_answer(client)[0] == 429
            assert len(server.early) == 2 == server.admission.num_refused and is_open(client)


def test_only_a_full_queue_refuses(make: Callable[..., App]) -> None:
    """A queue is full by completions or by prompt tokens. With two models the body names one."""
    app = make()
    admission, path = app.models.all[0].admission, "/v1/completions"
    is_full = app.early_refusals.is_full
    app.check_room(path)
    assert not is_full()
    admission.num_prompt_tokens = admission.max_prompt_tokens
    with pytest.raises(Overloaded, match="prompt tokens"):
        app.check_room(path)
    assert is_full()
    admission.num_prompt_tokens -= 1
    app.check_room(path)
    assert not is_full()
    admission.num_live = admission.num_slots + admission.max_queued
    for refused in (path, "/completions", "/v1/responses", "/v1/messages", "/infill"):
        with pytest.raises(Overloaded, match="completions are being served"):
            app.check_room(refused)
    app.check_room("/tokenize")
    assert is_full()
    app.models.all *= 2
    app.check_room(path)
    assert not is_full()
    app.models.all.pop()
    app.lifecycle.is_draining = True
    with pytest.raises(ApiError, match="stopping"):
        app.check_room(path)
    assert not is_full()
    admission.num_live = admission.num_prompt_tokens = 0


def test_the_answer_of_a_full_queue_is_encoded_once(
    make: Callable[..., App], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most refusals of a queue say the same."""
    encoded, encode = [], early_refusals._response

    def count(error: Overloaded) -> bytes:
        encoded.append(error)
        return encode(error)

    monkeypatch.setattr(early_refusals, "_response", count)
    data = post() + BODY
    with bind("127.0.0.1", 0) as listener, serving(make(), listener) as server:
        address, seen = listener.getsockname(), set()
        with sent(server, address, data * 3, ON_SOCKET) as client:
            for _ in range(3):
                status, _, body = read_answer(client)
                seen.add((status, body))
        assert len(encoded) == 1 and len(seen) == 1 and seen.pop()[0] == 429
        server.admission.max_queued -= 1
        with sent(server, address, data, ON_SOCKET) as client:
            assert read_answer(client)[2] != body
        assert len(encoded) == 2
