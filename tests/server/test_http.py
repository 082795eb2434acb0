"""Bad HTTP: each request gets the right status, and other requests are unaffected."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, suppress

import pytest

from tests.server import attacks
from tests.server.attacks import POST
from tests.server.conftest import KEYS
from tests.support.live_server import Server, read_all, status_of

GOOD = {"prompt": "a", "max_tokens": 2, "temperature": 0}


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\nhost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"\x00\x01\x02\x03\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\nxyz\r\n{}\r\n0\r\n\r\n",
        POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        POST + b"content-length: -1\r\n\r\n{}",
        POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        POST + b"x-folded: one\r\n two\r\ncontent-length: 2\r\n\r\n{}",
    ],
    ids=[
        "line",
        "version",
        "http2",
        "no-host",
        "binary",
        "chunk",
        "both-lengths",
        "length",
        "two",
        "fold",
    ],
)
def test_malformed_requests_are_refused_and_closed(server: Server, data: bytes) -> None:
    answer = server.send(data)
    assert status_of(answer) == 400, answer


@pytest.mark.parametrize("size", [1 << 20, 20 << 20])
def test_large_headers_are_refused(server: Server, size: int) -> None:
    before = server.memory()
    answer = server.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * size)
    assert status_of(answer) in (431, 0)  # 0 where the kernel dropped the answer with our bytes
    assert server.memory() - before < 8 << 20


def test_many_headers_are_refused(server: Server) -> None:
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
    many = b"".join(b"x%d: a\r\n" % number for number in range(10_000))
    assert status_of(server.send(head + many + b"\r\n")) in (431, 0)
    few = b"".join(b"x%d: a\r\n" % number for number in range(99))
    assert status_of(server.send(head + few + b"connection: close\r\n\r\n")) == 431
    assert (
        status_of(server.send(head + few[: few.index(b"x97")] + b"connection: close\r\n\r\n"))
        == 200
    )
    long = b"x: " + b"a" * (9 << 10)
    assert status_of(server.send(head + long + b"\r\n\r\n")) == 431


def test_half_open_headers_are_closed_while_others_are_served(server: Server) -> None:
    attacks.half_open(server, 200)


def test_a_slow_body_is_given_up(server: Server) -> None:
    attacks.slow_body(server, 0.2)


def test_large_bodies_are_refused_at_the_limit(server: Server) -> None:
    assert status_of(server.send(POST + b"content-length: 10000000000\r\n\r\n{")) == 413
    most = 8 << 20
    body = json.dumps(GOOD).encode()
    assert server.request("/v1/completions", body + b" " * (most - len(body))).status == 200
    answer = server.request("/v1/completions", body + b" " * (most + 1 - len(body)))
    assert answer.status == 413 and answer.error["code"] == "too_large"


def test_an_endless_chunked_body_is_refused(server: Server) -> None:
    before = server.memory()
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with server.connect() as one:
        one.sendall(POST + b"transfer-encoding: chunked\r\n\r\n")
        with suppress(ConnectionError):
            while True:  # until the server has had enough, or the test's time is over
                one.sendall(piece)
    assert server.memory() - before < 32 << 20


@pytest.mark.parametrize("size", [(8 << 20) + 1, 1 << 60])
def test_a_chunk_that_will_be_too_large_is_refused_before_it_comes(
    server: Server, size: int
) -> None:
    head = POST + b"transfer-encoding: chunked\r\n\r\n"
    for before in (b"", b"5\r\n     \r\n"):
        answer = server.send(head + before + b"%x\r\n" % size)  # and no further bytes
        assert status_of(answer) == 413 and b"larger than 8388608 bytes" in answer
    body = json.dumps(GOOD).encode()
    good = b"%x\r\n%b\r\n0\r\n\r\n" % (8 << 20, body + b" " * ((8 << 20) - len(body)))
    closing = head.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    assert status_of(server.send(closing + good)) == 200


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost:1/v1/models", "localhost", 200),
        ("HTTP://127.0.0.1/v1/models?a=b", "evil.example", 200),  # the target decides
        ("https://[::1]:80/v1/models", "", 200),
        ("http://evil.example/v1/models", "localhost", 403),
        ("http://localhost@evil.example/v1/models", "localhost", 403),
        ("http:///v1/models", "localhost", 400),
        ("http://localhost?x=1", "localhost", 200),
        ("ftp://localhost/v1/models", "localhost", 404),
    ],
)
def test_targets_in_absolute_form(server: Server, target: str, host: str, status: int) -> None:
    head = f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
    assert status_of(server.send(head.encode())) == status


def test_a_body_in_tiny_chunks_is_refused(server: Server) -> None:
    attacks.tiny_chunks(server, 300_000)
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in json.dumps(GOOD).encode())
    end = b"0\r\n\r\n"
    head = POST + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    assert status_of(server.send(head + pieces + end)) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"content-encoding": "gzip"},
        {"content-encoding": "br"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "text/plain"},
        {"content-type": ""},
    ],
)
def test_other_media_are_refused(server: Server, headers: dict[str, str]) -> None:
    answer = server.request("/v1/completions", GOOD, headers)
    assert answer.status == 415 and answer.error


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("PUT", "/health", 405),
        ("BREW", "/health", 405),
        ("POST", "/v1/nothing", 404),
        ("GET", "//v1/../x", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/nothing", 404),
        ("GET", "/v1/models/../../etc/passwd", 404),
        ("GET", "/%2e%2e/%00", 404),
    ],
)
def test_wrong_methods_and_paths(server: Server, method: str, path: str, status: int) -> None:
    headers = {"content-type": "application/json"}
    answer = server.request(path, None, headers, method)
    assert answer.status == status and answer.error


def test_every_route_but_probes_asks_for_the_key(narrow: Server) -> None:
    paths = narrow.request("/openapi.json").json()["paths"]
    routes = {*paths, "/openapi.json", "/nothing", "/v1/models/demo_model"} - {"/health", "/ready"}
    narrow.key = None
    try:
        for path in routes:
            for method in ("GET", "POST", "HEAD", "OPTIONS", "DELETE", "PUT"):
                assert narrow.request(path, None, {}, method).status == 401, (method, path)
        for path in ("/health", "/ready", "/", "/page/main.js"):
            assert narrow.request(path).status == 200
    finally:
        narrow.key = KEYS[0]


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("Authorization", f"Bearer {KEYS[0]}", 200),
        ("Authorization", f"bearer {KEYS[1]}", 200),
        ("x-api-key", KEYS[1], 200),
        ("Authorization", f"Basic {KEYS[0]}", 401),
        ("Authorization", "Bearer ", 401),
        ("Authorization", "", 401),
        ("Authorization", f"Bearer {KEYS[0]}x", 401),
        ("Authorization", "Bearer schl\xfcssel", 401),
        ("x-api-key", "", 401),
        ("x-api-key", "\xff", 401),
        ("x-api-key", "k" * 5000, 401),
        ("x-api-key", "k" * (1 << 20), 431),
    ],
)
def test_keys(narrow: Server, header: str, value: str, status: int) -> None:
    text = f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n{header}: {value}\r\n"
    answer = narrow.send(text.encode("latin-1") + b"connection: close\r\n\r\n")
    assert status_of(answer) in ((status, 0) if status == 431 else (status,))
    if status == 401:
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_api_key"


def test_a_key_given_twice_or_in_the_query_is_none(narrow: Server) -> None:
    good = f"authorization: Bearer {KEYS[0]}\r\n".encode()
    head = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    assert status_of(narrow.send(head + good + b"\r\n")) == 200
    assert status_of(narrow.send(head + good + good + b"\r\n")) == 401
    query = head.replace(b"/v1/models", b"/v1/models?api_key=" + KEYS[0].encode())
    assert status_of(narrow.send(query + b"\r\n")) == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost:1"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": "127.0.0.1@evil.example"}, 403),
        ({"host": ""}, 403),
        ({"origin": "http://localhost:3000"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
    ],
)
def test_other_sites_cannot_call_a_local_server(
    server: Server, headers: dict[str, str], status: int
) -> None:
    lines = "".join(
        f"{name}: {value}\r\n" for name, value in ({"host": "localhost"} | headers).items()
    )
    data = f"GET /v1/models HTTP/1.1\r\nconnection: close\r\n{lines}\r\n"
    assert status_of(server.send(data.encode())) == status


def test_pages_of_allowed_origins_may_call(narrow: Server) -> None:
    asked = {"origin": "http://app.example", "access-control-request-method": "POST"}
    narrow.key = None  # a browser asks first, and without the key
    try:
        answer = narrow.request("/v1/completions", None, asked, "OPTIONS")
    finally:
        narrow.key = KEYS[0]
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == "http://app.example"
    for origin, status in (("http://app.example", 200), ("http://evil.example", 403)):
        answer = narrow.request("/v1/models", None, {"origin": origin})
        assert answer.status == status
        allowed = answer.headers.get("access-control-allow-origin")
        assert (allowed == origin) == (status == 200)


BAD_JSON = {
    "empty": b"",
    "cut": b'{"prompt": "a"',
    "trailing": b'{"prompt": "a"} x',
    "utf-8": b'{"prompt": "\xff"}',
    "utf-16": '{"prompt": "a"}'.encode("utf-16"),
    "mark": b'\xef\xbb\xbf{"prompt": "a"}',
    "nul": b'{"prompt": "a\x00"}',
    "surrogate": b'{"prompt": "\\ud800"}',
    "surrogate-middle": b'{"prompt": "\\ud800 and more of it"}',
    "low-surrogate": b'{"prompt": "\\udc00 and more of it"}',
    "deep-lists": b'{"prompt": ' + b"[" * 100_000,
    "deep-objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "empty-lists": b'{"prompt": [' + b"[]," * 2_700_000 + b"[]]}",
    "digits": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "twice": b'{"prompt": "a", "n": 1, "n": 2}',
    "twice-escaped": b'{"prompt": "a", "n": 1, "\\u006e": 2}',
    "twice-inside": b'{"prompt": "a", "stream_options": {"x": 1, "x": 1}}',
    "nan": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": -Infinity}',
    "too-large": b'{"prompt": "a", "temperature": 1e999}',
    "quotes": b'{"prompt": "' + b'\\"' * 1_000_000,
    "list": b"[1, 2]",
    "text": b'"prompt"',
    "null": b"null",
    "number": b"7",
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_bodies_that_are_no_json_object(server: Server, name: str) -> None:
    answer = server.request("/v1/completions", BAD_JSON[name])
    assert answer.status == 400 and answer.error


@pytest.mark.parametrize(
    "fields",
    [
        {name: value}
        for name, values in {
            "n": (True, "5", 1.0, 1.5),
            "temperature": ("1", True),
            "stream": (1, "true"),
            "stop": (5, [1]),
            "prompt": ({}, None, 1.5, [1.5], [True], [None]),
            "max_tokens": ([], 1.5),
            "seed": (1.5,),
            "echo": ("yes",),
            "model": (7,),
            "stream_options": ([],),
        }.items()
        for value in values
    ],
    ids=json.dumps,
)
def test_wrong_types_are_named(server: Server, fields: dict) -> None:
    answer = server.request("/v1/completions", GOOD | fields)
    assert answer.status == 400
    assert answer.error["param"] == next(iter(fields))


def test_nesting_is_taken_up_to_the_limit(server: Server) -> None:
    for depth, status in ((62, 200), (63, 400)):  # beside the body's own and the list's
        body = json.dumps(GOOD)[:-1] + ', "user_data": [' + "[" * depth + "]" * depth + "]}"
        assert server.request("/v1/completions", body.encode()).status == status


def test_commas_and_brackets_in_text_are_no_nodes(server: Server) -> None:
    fields = GOOD | {"prompt": "a", "note": '[{,:"\\' * 100_000}
    assert server.request("/v1/completions", fields).status == 200


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        (b"abc-1", b"abc-1"),
        (b"a" * 5000, b"a" * 128),
        (b"a b\tc\xff\x1b[31m", b"abc[31m"),
    ],
)
def test_request_ids_come_back_clean(server: Server, given: bytes, echoed: bytes) -> None:
    head = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-request-id: "
    answer = server.send(head + given + b"\r\n\r\n")
    if status_of(answer) == 200:
        assert b"\r\nx-request-id: " + echoed + b"\r\n" in answer
    else:
        assert status_of(answer) == 400  # a control character in a header


def test_each_answer_has_a_request_id(server: Server) -> None:
    ids = {server.request("/version").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3 and all(len(one) >= 16 for one in ids)


def test_more_connections_than_allowed_are_refused(narrow: Server) -> None:
    with ExitStack() as idle:
        for _ in range(24):
            idle.enter_context(narrow.connect())
        with narrow.connect() as one:
            answer = read_all(one)
        assert status_of(answer) == 503 and b"too_many_connections" in answer
        for path, status in (("/v1/models", 503), ("/", 503), ("/health", 200)):
            answer = narrow.request(path)
            assert (answer.status, answer.headers["connection"]) == (status, "close")
        # Silent connections do not keep later clients from /health.
        for _ in range(100):
            idle.enter_context(narrow.connect())
        assert narrow.request("/health").status == 200
    while narrow.request("/health").status != 200:  # it learns in its own time that they left
        time.sleep(0.02)
