"""Clients that speak HTTP in unusual ways: bit by bit, ahead of the answers, not to the end."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress

import pytest

from tests.server import attacks
from tests.server.attacks import POST
from tests.server.test_http import GOOD
from tests.support.live_server import Server, read_all, status_of


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_body_that_nobody_reads_gets_no_more_time(server: Server, method: str) -> None:
    """The answer does not wait for the body, and the body cannot hold the connection for ever."""
    head = f"{method} /version HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n"
    with server.connect() as one:
        one.sendall(head.encode())
        assert status_of(one.recv(1 << 16)) == {"GET": 200, "POST": 415}[method]
        one.settimeout(0.2)
        for _ in range(20):
            with suppress(OSError):
                one.sendall(b"x")
            try:
                one.recv(1 << 16)
                break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            raise AssertionError("still open")


def test_a_header_sent_byte_by_byte_gets_no_more_time(server: Server) -> None:
    with server.connect() as one:
        sent = 0
        try:
            for byte in b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 60:
                one.sendall(bytes([byte]))
                sent += 1
                time.sleep(0.1)
        except OSError:
            pass
        assert sent < 60


def test_pipelined_requests_are_all_answered(server: Server) -> None:
    attacks.pipelined(server, 2000)


def test_pipelined_work_is_answered_in_order(server: Server) -> None:
    ask = [
        server.http("/v1/completions", json.dumps(GOOD | {"max_tokens": n}).encode())
        for n in (3, 1, 2)
    ]
    last = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    answer = server.send(b"".join(ask) + last)
    assert re.findall(rb'"completion_tokens":(\d)', answer) == [b"3", b"1", b"2"]


def test_a_client_may_ask_before_it_sends_its_body(server: Server) -> None:
    body = json.dumps(GOOD).encode()
    head = POST + b"connection: close\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"
    with server.connect() as one:
        one.sendall(head % len(body))
        assert one.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        one.sendall(body)
        assert status_of(read_all(one)) == 200
    with server.connect() as one:  # refused by its head alone: the body is never asked for
        one.sendall(head % (9 << 20))
        assert status_of(read_all(one)) == 413


def test_trailers_of_a_chunked_body_are_let_be(server: Server) -> None:
    body = json.dumps(GOOD).encode()
    head = POST + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = b"%x\r\n%b\r\n0\r\nx-sum: 1\r\ncontent-length: 5\r\n\r\n" % (len(body), body)
    assert status_of(server.send(head + chunks)) == 200
    long = b"0\r\n" + b"x: " + b"a" * (1 << 20) + b"\r\n\r\n"
    assert status_of(server.send(head + long)) in (400, 431, 0)


def test_a_client_that_leaves_in_the_middle_of_its_body(server: Server) -> None:
    attacks.reset_in_the_body(server, 50)
