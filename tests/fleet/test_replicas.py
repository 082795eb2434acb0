"""Two replicas on Ray Serve: answers, refusals, the death of one, and the end of all."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest

from scripts.serving.fleet import kill_once
from scripts.serving.replicas import Fleet, left_over

pytestmark = pytest.mark.ray
LONG = {"prompt": "Reverse: s-t-o-n-e", "max_tokens": 900, "temperature": 0, "ignore_eos": True}


def request(fleet: Fleet, path: str, body: Any = None, **headers: str) -> tuple[int, dict, bytes]:
    connection = http.client.HTTPConnection(urlsplit(fleet.url).netloc, timeout=60)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        named = {"content-type": "application/json"} if data is not None else {}
        connection.request("GET" if data is None else "POST", path, data, named | headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_replicas_answer_as_one_server_does(fleet: Fleet) -> None:
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0)
    question: Any = [{"role": "user", "content": "What is 47 + 8?"}]
    fields = {"model": "demo_model", "messages": question, "temperature": 0}
    answers = [client.chat.completions.create(**fields) for _ in range(6)]
    assert {answer.choices[0].message.content for answer in answers} == {"55"}
    stream = client.chat.completions.create(**fields, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in stream) == "55"
    client.close()


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "code"),
    [
        ("/nothing", None, {}, 404, "not_found"),
        ("/v1/completions", {"prompt": "a", "max_tokens": -2}, {}, 400, None),
        ("/v1/completions", {"prompt": "a", "model": "b"}, {}, 404, "model_not_found"),
        ("/v1/models", None, {"x-long": "x" * 9000}, 431, "header_too_long"),
        ("/v1/models", None, {f"x-{n}": "x" for n in range(120)}, 431, "too_many_headers"),
        ("/v1/completions", b"x" * (9 << 20), {}, 413, "too_large"),
        ("/v1/models", None, {"host": "elsewhere.example"}, 403, "bad_host"),
    ],
)
def test_limits_hold_behind_the_proxy_and_errors_are_as_ever(
    fleet: Fleet, path: str, body: Any, headers: dict[str, str], status: int, code: str | None
) -> None:
    got, _, text = request(fleet, path, body, **headers)
    error = json.loads(text)["error"]
    assert got == status and set(error) == {"message", "type", "param", "code"}
    assert code is None or error["code"] == code


def test_what_would_be_lost_with_a_replica_is_not_stored(fleet: Fleet) -> None:
    body = {"input": "hello", "max_output_tokens": 4}
    status, _, text = request(fleet, "/v1/responses", body)
    assert status == 200
    status, _, text = request(fleet, f"/v1/responses/{json.loads(text)['id']}")
    assert status == 404 and json.loads(text)["error"]["message"]


def test_a_replica_killed_under_load_costs_no_answer(fleet: Fleet) -> None:
    result = asyncio.run(kill_once(fleet, 200, max_retries=0))
    assert result["failures"] == []
    assert result["answered"]["unary"] == 134
    assert result["answered"]["stream"] + sum(result["broken"].values()) == 66


def kill_while_streaming(
    fleet: Fleet, client: openai.OpenAI, fields: dict[str, Any]
) -> list[tuple[str, bool]]:
    """Read eight streams, and kill all replicas at the first text.

    Returns:
        The text of each stream, and whether the stream ended in an error.
    """
    # All: a process that is there may be one that still loads, which no stream would miss.
    replicas, killing = fleet.replicas(), threading.Lock()

    def read(_: int) -> tuple[str, bool]:
        text = ""
        try:
            for event in client.completions.create(**fields, stream=True):
                text += event.choices[0].text
                # Here, because another thread would wait for its turn while the streams go on.
                if text and killing.acquire(blocking=False):
                    for number in replicas:
                        os.kill(number, signal.SIGKILL)
        except (openai.OpenAIError, httpx2.HTTPError):
            return text, True
        return text, False

    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(read, range(8)))


def test_streams_of_killed_replicas_end_in_an_error(fleet: Fleet) -> None:
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", timeout=60, max_retries=0)
    fields: Any = {"model": "demo_model", **LONG, "extra_body": {"ignore_eos": True}}
    del fields["ignore_eos"]
    with client:
        # On a loaded machine all streams of a replica may end before their first event is read.
        for _ in range(5):
            answer = client.with_options(max_retries=20).completions.create(**fields)
            right = answer.choices[0].text
            ends = kill_while_streaming(fleet, client, fields)
            assert all(right.startswith(text) for text, _ in ends)
            assert all(text == right for text, broke in ends if not broke)
            if any(text and broke for text, broke in ends):
                return
    pytest.fail("no stream was read in part when its replica was killed")


def listeners(processes: Mapping[int, str]) -> set[tuple[str, str]]:
    """Return the addresses that processes listen at, by /proc/net, with the processes' names."""
    names: dict[str, str] = {}
    for number, name in processes.items():
        with suppress(OSError):
            links = [os.readlink(path) for path in Path(f"/proc/{number}/fd").iterdir()]
            names |= {link[8:-1]: name for link in links if link.startswith("socket:[")}
    rows = [
        row.split()
        for kind in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    return {
        (row[1].partition(":")[0], names[row[9]])
        for row in rows
        if row[3] == "0A" and row[9] in names
    }


def test_a_cluster_of_this_machine_is_open_to_its_user_alone(fleet: Fleet) -> None:
    found = listeners(fleet.processes())
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "0" * 24 + "01000000"}
    assert found and [name for address, name in found if address not in loopback] == []
    variables = Path(f"/proc/{fleet.replicas()[0]}/environ").read_text().split("\0")
    [home] = [Path(text[5:]) for text in variables if text.startswith("HOME=")]
    assert (home / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600


def test_nothing_is_left_after_sigterm(fleet: Fleet) -> None:
    before = fleet.processes()
    assert len(before) > 5
    assert fleet.stop() == 0
    assert left_over(before) == {}
