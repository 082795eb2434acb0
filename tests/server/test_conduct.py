"""Conduct under load and among clients that leave, stall or lie."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from typing import Any

import pytest

from tests.server import attacks
from tests.server.attacks import LONG, STREAM, WORDY, ended
from tests.server.conftest import KEYS
from tests.support.live_server import SMALL, Server, read_all, read_stream, status_of


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_in_decode_ends_the_request(slow: Server, stream: bool) -> None:
    before = ended(slow, "length"), ended(slow, "abort")
    with slow.open_stream(LONG | {"stream": stream}):
        slow.wait_for("num_requests_running", lambda value: value == 1)
        drawn = slow.metric("generation_tokens_total")
        slow.wait_for("generation_tokens_total", lambda value: value > drawn + 5)
    slow.wait_until_idle()
    assert (ended(slow, "length"), ended(slow, "abort")) == (before[0], before[1] + 1)


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_in_prefill_ends_the_request(slow: Server, stream: bool) -> None:
    for _ in range(5):
        fields = {"prompt": [7] * 630, "max_tokens": 9, "stream": stream, "cache_salt": str(_)}
        slow.open_stream(fields).close()
    slow.wait_until_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_the_queue_ends_the_request(slow: Server, stream: bool) -> None:
    fields = LONG | {"stream": stream, "n": 4}
    with ExitStack() as stay, ExitStack() as leave:
        running = [stay.enter_context(slow.open_stream(STREAM)) for _ in range(2)]
        slow.wait_for("num_requests_running", lambda value: value >= 1)
        for _ in range(6):
            leave.enter_context(slow.open_stream(fields))
        slow.wait_for("num_requests_waiting", lambda value: value >= 8)
        leave.close()
        slow.wait_for("num_requests_waiting", lambda value: value == 0)
        assert all(b"200 OK" in one.recv(1000) for one in running)


def test_leaving_while_preempted(slow: Server) -> None:
    """Four of these fit the cache at their start, and only one at its end."""
    before = slow.metric("num_preemptions_total")
    with ExitStack() as leave:
        for n in range(4):
            leave.enter_context(slow.open_stream(LONG | {"cache_salt": str(n)}))
        slow.wait_for("num_preemptions_total", lambda value: value > before)


def test_leaving_at_the_end(server: Server) -> None:
    for _ in range(20):
        with server.open_stream({"prompt": "a", "max_tokens": 1}):
            pass
        server.send(server.http("/v1/completions", b'{"prompt": "a", "max_tokens": 1}'), True)


def test_many_leave_at_once(server: Server) -> None:
    attacks.leave_in_every_phase(server, 40)


def test_a_reader_that_never_reads_is_paused_then_dropped(server: Server) -> None:
    attacks.never_read(server, 12)


def test_a_slow_reader_gets_everything(server: Server) -> None:
    fields = WORDY | {"seed": 1, "temperature": 1.0}
    whole = server.request("/v1/completions", fields | {"stream": False}).json()["choices"]
    with server.open_stream(fields) as one:
        server.wait_for("num_requests_paused", lambda value: value == 1)
        data = bytearray()
        while b"[DONE]" not in data:
            data += one.recv(2048)
    texts = ["", ""]
    for line in data.decode().splitlines():
        if line.startswith("data: {"):
            [choice] = json.loads(line.removeprefix("data: "))["choices"]
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole]


def test_short_requests_are_served_beside_a_long_prompt(slow: Server) -> None:
    with slow.open_stream(STREAM | {"prompt": [9] * 400, "max_tokens": 200}):
        slow.wait_for("num_requests_running", lambda value: value == 1)
        for _ in range(3):
            assert slow.complete("a", 2).status == 200
        assert slow.metric("num_requests_running") == 1


def test_clients_with_one_id_do_not_meet(server: Server) -> None:
    fields = STREAM | {"request_id": "same", "max_tokens": 150}
    data = server.http("/v1/completions", json.dumps(fields).encode())
    leaves, stays = (server.connect() for _ in range(2))
    for one in (leaves, stays):
        one.sendall(data.replace(b"\r\n", b"\r\nx-request-id: same\r\n", 1))
    leaves.recv(100)
    leaves.close()
    with stays:
        data = bytearray()
        while b"[DONE]" not in data:
            data += stays.recv(1 << 16)
    assert b'"finish_reason":"length"' in data


def test_random_bytes_make_valid_events(server: Server) -> None:
    fields = {"prompt": [5], "temperature": 100.0, "seed": 7, "max_tokens": 300}
    answer = server.request("/v1/completions", fields | {"stream": True, "n": 2})
    texts: dict[int, str] = {}
    for event in answer.events()[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    whole = server.request("/v1/completions", fields | {"n": 2}).json()["choices"]
    assert [texts[0], texts[1]] == [choice["text"] for choice in whole]
    assert "�" in texts[0] + texts[1]


def test_prompts_cannot_write_the_log(server: Server) -> None:
    nasty = 'secret\r\n{"level":"critical"}\x1b[31m %s %(x)s {0}'
    server.complete(nasty)
    server.complete([5], stop=nasty * 100)
    server.request("/" + "secret%0d%0a%1b[31m", None)
    server.send(b"secret \x1b[31m\r\n\r\n")
    time.sleep(0.1)
    start = next(n for n, line in enumerate(server.log) if "ready at" in line)
    for line in server.log[start + 1 :]:
        assert json.loads(line)["level"] != "critical"
        assert "secret" not in line


def test_a_flood_of_bad_requests(server: Server) -> None:
    attacks.flood(server, 2000)


def test_requests_cannot_add_time_series(server: Server) -> None:
    def series() -> set[bytes]:
        lines = server.request("/metrics").body.splitlines()
        return {line.rpartition(b" ")[0] for line in lines if not line.startswith(b"#")}

    server.complete("a", 2)
    before = series()
    for number in range(20):
        name = f"name-{number}"
        ids = {"x-request-id": name}
        server.request("/v1/completions", {"prompt": "a", "model": name}, ids)
        fields = {"prompt": "a", "max_tokens": 1, "request_id": name, "user": name}
        assert server.request("/v1/completions", fields, ids).status == 200
        server.request(f"/v1/models/{name}")
    assert series() <= before | {line for line in series() if b"finished_reason" in line}
    assert not any(b"name-" in line for line in series())


def test_what_the_queue_cannot_hold_is_refused(narrow: Server) -> None:
    with ExitStack() as leave:
        leave.enter_context(narrow.open_drawing(STREAM))
        for _ in range(2):
            leave.enter_context(narrow.open_stream(STREAM))
        narrow.wait_for("num_requests_waiting", lambda value: value == 2)
        refused = narrow.metric("request_refused_total")
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages"):
            messages = [{"role": "user", "content": "a"}]
            body = {"prompt": "a"} if path == "/v1/completions" else {"messages": messages}
            answer = narrow.request(path, body | {"max_tokens": 5})
            assert answer.status == 429 and answer.error["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1
        # refused before the body is read
        assert narrow.request("/v1/completions", b"no JSON").status == 429
        assert narrow.metric("request_refused_total") == refused + 4
        assert narrow.request("/ready").status == 503
        assert narrow.request("/health").status == 200


def test_prompt_tokens_in_the_queue_are_bounded(narrow: Server) -> None:
    # The first has drawn, or its own prompt would count too.
    with narrow.open_drawing(STREAM), narrow.open_stream(STREAM | {"prompt": [6] * 60}):
        narrow.wait_for("num_requests_waiting", lambda value: value == 1)
        answer = narrow.complete([7] * 60)
    assert answer.status == 429 and "prompt tokens" in answer.error["message"]


def test_what_takes_too_long_is_answered() -> None:
    """Waiting longer than allowed, then running: one request holds the only slot meanwhile."""
    times = "--queue-timeout 0.3 --request-timeout 3 --max-num-seqs 1 --decode-sizes 1"
    with Server([*SMALL, *times.split()], module="tests.support.slow_server") as server:
        for stream in (False, True):
            with server.open_stream(STREAM | {"n": 2}) as first:
                server.wait_for("num_requests_running", lambda value: value == 1)
                answer = server.complete([5], stream=stream)
                assert answer.status == 503 and answer.error["code"] == "queue_timeout"
                assert b"200 OK" in first.recv(100)
            server.wait_until_idle()
        answer = server.request("/v1/completions", LONG | {"n": 3})
        assert answer.status == 504 and answer.error["code"] == "request_timeout"
        answer = server.request("/v1/completions", STREAM | {"n": 3})
        assert answer.status == 200
        *_, error, done = answer.events()
        assert error["error"]["code"] == "request_timeout" and done == "[DONE]"
        body = {"input": "a", "max_output_tokens": 400, "ignore_eos": True, "stream": True}
        *_, failed = server.request("/v1/responses", body).events()
        assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
        assert failed["response"]["error"]["code"] == "server_error"
        assert "took longer" in failed["response"]["error"]["message"]


def test_keys_do_not_share_prefixes(narrow: Server) -> None:
    prompt = list(range(40, 140))

    def cached(key: str, **fields: Any) -> int:
        narrow.key = key
        usage = narrow.complete(prompt, 1, **fields).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    try:
        assert [cached(key) for key in (KEYS[0], KEYS[1], KEYS[0], KEYS[1])] == [0, 0, 96, 96]
        assert [cached(KEYS[0], cache_salt=salt) for salt in ("s", "s")] == [0, 96]
        assert cached(KEYS[1], cache_salt="s") == 0
    finally:
        narrow.key = KEYS[0]


def test_two_models_in_one_process_and_an_orderly_end() -> None:
    folder = "jaxserve/demo_model"
    flags = [flag for flag in SMALL if flag not in ("--num-gpu-blocks-override", "41")]
    memory = ["--kv-cache-memory-bytes", str(124 * 32768), "--model-weights", "a=3,b=1"]
    with Server([f"a={folder}", f"b={folder}", *flags, *memory]) as server:
        cards = server.request("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["a", "b"]
        chat = {"messages": [{"role": "user", "content": "Reverse: s-t-o-n-e"}]}
        for name in ("a", "b", None):
            answer = server.request("/v1/chat/completions", chat | {"model": name}).json()
            assert answer["model"] == (name or "a")
            assert answer["choices"][0]["message"]["content"] == "e-n-o-t-s"
        text = server.request("/metrics").body.decode()
        for name, pages in (("a", 93), ("b", 31)):
            assert f'model_name="{name}",num_gpu_blocks="{pages}"' in text

        short = server.open_stream(STREAM | {"model": "a", "max_tokens": 400})
        unread = WORDY | {"model": "b", "max_tokens": 400, "n": 16}  # waits for its reader
        long = server.open_stream(unread)
        idle, fresh = server.connect(), server.connect()
        idle.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert status_of(idle.recv(1 << 16)) == 200
        with short, long, idle, fresh:
            head = [one.recv(20) for one in (short, long)]
            server.process.terminate()
            assert idle.recv(1) == fresh.recv(1) == b""  # while the streams go on
            deadline = time.monotonic() + 10
            while server.request("/health").status != 503:  # routers poll it
                assert time.monotonic() < deadline
            refused = server.request("/v1/chat/completions", chat)
            assert refused.status == 503 and refused.error["code"] == "shutting_down"
            assert refused.headers["connection"] == "close"
            for path in ("/health", "/v1/health", "/ping", "/ready"):
                assert server.request(path).error["code"] == "shutting_down"
            data = read_stream(short)
            assert b'"finish_reason":"length"' in data and b"[DONE]" in data
            server.process.terminate()
            data = head[1] + read_all(long)
            assert status_of(data) == 200 and b"shutting_down" in data
        assert server.process.wait(timeout=60) == 0


def test_a_second_server_cannot_take_the_port(server: Server) -> None:
    arguments = [*SMALL[:-1], str(server.port)]
    second = Server(arguments)
    with pytest.raises(RuntimeError, match="cannot listen on"):
        second.__enter__()
    second.__exit__()
    assert second.process.returncode == 2
