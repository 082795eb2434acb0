"""The front before Serve's proxy tries a request once more, until the first byte has come."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from jaxserve.fleet.front import MOST_KEPT_BYTES, Front

SCOPE = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}
JSON = [(b"content-type", b"application/json")]


class Replicas:
    """Simulates Serve's proxy; each request gets the next behavior of a list.

    Attributes:
        bodies: the body that each replica received.
    """

    def __init__(self, *acts: str) -> None:
        self.acts = list(acts)
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        act, body, more = self.acts.pop(0), b"", True
        while more and act != "dies at once":
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            body += message["body"]
            more = message["more_body"]
        self.bodies.append(body)
        if act.startswith("dies"):
            return
        status = int(act) if act.isdigit() else 200
        headers = [(b"content-type", b"text/plain")] if act.isdigit() else JSON
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        if act != "breaks":
            await send({"type": "http.response.body", "body": b"last", "more_body": False})


def run(replicas: Replicas, *pieces: bytes, leaves: bool = False) -> tuple[int, bytes, bool]:
    """Return the status, the body, and whether it came to its end."""
    messages: list[Any] = [
        {"type": "http.request", "body": piece, "more_body": leaves or number < len(pieces) - 1}
        for number, piece in enumerate(pieces)
    ]
    messages += [{"type": "http.disconnect"}] * 2
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Front(replicas)(SCOPE, receive, send))
    if not sent:
        return 0, b"", False
    starts = [message for message in sent if message["type"] == "http.response.start"]
    assert len(starts) == 1 and sent[0] is starts[0]
    body = b"".join(message.get("body", b"") for message in sent)
    return starts[0]["status"], body, not sent[-1].get("more_body", False)


def test_an_answer_passes() -> None:
    replicas = Replicas("answers")
    assert run(replicas, b"ab", b"c") == (200, b"first last", True)
    assert replicas.bodies == [b"abc"]


@pytest.mark.parametrize("death", ["dies", "dies at once"])
def test_a_request_whose_replica_died_is_tried_once_more(death: str) -> None:
    replicas = Replicas(death, "answers")
    assert run(replicas, b"ab", b"c") == (200, b"first last", True)
    assert replicas.bodies[-1] == b"abc"


def test_it_is_not_tried_a_third_time() -> None:
    replicas = Replicas("dies", "dies", "answers")
    status, body, _ = run(replicas, b"abc")
    assert status == 503 and json.loads(body)["error"]["code"] == "replica_died"
    assert replicas.acts == ["answers"]


def test_nothing_is_tried_again_once_an_answer_has_begun() -> None:
    replicas = Replicas("breaks", "answers")
    assert run(replicas, b"abc") == (200, b"first ", False)
    assert replicas.acts == ["answers"]


def test_a_large_body_is_not_kept() -> None:
    replicas = Replicas("dies", "answers")
    status, body, _ = run(replicas, b"a" * MOST_KEPT_BYTES, b"b")
    assert status == 503 and json.loads(body)["error"]["code"] == "replica_died"
    assert replicas.acts == ["answers"]


def test_a_client_that_left_is_not_served_again() -> None:
    replicas = Replicas("dies", "answers")
    assert run(replicas, b"abc", leaves=True) == (0, b"", False)
    assert replicas.acts == ["answers"]


@pytest.mark.parametrize(
    ("act", "status", "code"),
    [
        ("404", 503, "no_replica"),
        ("408", 408, "request_timeout"),
        ("429", 429, "queue_full"),
        ("503", 503, "no_replica"),
    ],
)
def test_errors_of_serve_itself_get_our_form(act: str, status: int, code: str) -> None:
    got, body, ended = run(Replicas(act), b"abc")
    assert (got, ended) == (status, True)
    assert json.loads(body)["error"]["code"] == code
