"""Messages of a server whose engine stalls or dies."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import threading

import httpx2
import pytest

from jaxserve import SamplingParams
from jaxserve.commands.start_output import StartOutput, Stop
from jaxserve.server.api.generation import Generation
from jaxserve.server.http.app import App
from jaxserve.server.http.listener import bind
from jaxserve.server.http.process import Process
from jaxserve.server.settings import ServerConfig
from tests.support.slow_server import slow_down


async def get(app: App, path: str) -> tuple[int, dict]:
    transport = httpx2.ASGITransport(app.asgi)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.get(path)
        return answer.status_code, answer.json()


def test_a_stalled_engine_is_unhealthy_until_it_moves(app: App) -> None:
    async def scene() -> None:
        thread = app.models.all[0].llm._thread
        assert (await get(app, "/health"))[0] == 200
        over = threading.Event()
        stall = asyncio.get_running_loop().run_in_executor(None, thread.call, over.wait)
        while (await get(app, "/health"))[0] == 200:
            await asyncio.sleep(0.01)
        for path in ("/health", "/ready"):
            status, answer = await get(app, path)
            assert status == 503 and answer["error"]["code"] == "stalled"
        assert (await get(app, "/version"))[0] == 200
        over.set()
        await stall
        while (await get(app, "/health"))[0] != 200:
            await asyncio.sleep(0.01)

    asyncio.run(scene())


def test_a_server_that_stops_is_unhealthy_for_routers(app: App) -> None:
    async def scene() -> None:
        app.lifecycle.is_draining = True
        for path in ("/health", "/v1/health", "/ping", "/ready"):
            status, answer = await get(app, path)
            assert status == 503 and answer["error"]["code"] == "shutting_down"
        assert (await get(app, "/version"))[0] == 200

    asyncio.run(scene())


def test_a_dead_engine_ends_the_process(app: App) -> None:
    async def scene() -> None:
        process = Process(app)
        assert not await process.on_tick(1)
        app.models.all[0].llm.close()
        status, answer = await get(app, "/health")
        assert status == 503 and answer["error"]["code"] == "engine_dead"
        assert await process.on_tick(2)
        assert process.status == 1

    asyncio.run(scene())


def test_an_engine_that_dies_answers_what_it_served(app: App) -> None:
    async def scene() -> None:
        thread = app.models.all[0].llm._thread
        slow_down(thread.engine, 0.1)

        def die() -> None:
            raise SystemExit("broken")

        transport = httpx2.ASGITransport(app.asgi)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
            asked = asyncio.ensure_future(client.post("/v1/completions", json=body))
            while not app.models.all[0].active:
                await asyncio.sleep(0.001)
            thread.engine.step = die
            answer = await asked
        assert answer.status_code in (500, 503) and answer.json()["error"]["code"]

    asyncio.run(scene())


def test_what_waits_for_its_reader_takes_no_place_from_others(app: App) -> None:
    async def scene() -> None:
        [model] = app.models.all
        model.config = ServerConfig(max_unread_tokens=3)
        slow_down(
            model.llm._thread.engine, 0.03
        )  # slow steps, so that a resumed stream shows before it waits again
        sampling = SamplingParams(max_tokens=20, ignore_eos=True, n=2)
        for read_on in (True, False):
            with Generation(model, [model.llm.requests.make("a", sampling)]) as generation:
                assert model.admission.num_live == 2
                async with asyncio.timeout(30):
                    while not generation.is_paused:
                        await asyncio.sleep(0.001)
                assert model.admission.num_live == 0
                if read_on:
                    await generation.take()
                    assert model.admission.num_live == 2
                    await generation.run()
                    assert [len(one.token_ids) for one in generation.choices] == [20, 20]
            assert model.admission.num_live == model.admission.num_prompt_tokens == 0

    asyncio.run(scene())


def test_requests_that_come_together_do_not_pass_the_bound_together(app: App) -> None:
    async def scene() -> None:
        admission = app.models.all[0].admission
        most = admission.num_slots + admission.max_queued
        body = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}
        transport = httpx2.ASGITransport(app.asgi)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for stream in (False, True):
                asked = [
                    client.post("/v1/completions", json=body | {"stream": stream})
                    for _ in range(3 * most)
                ]
                codes = [answer.status_code for answer in await asyncio.gather(*asked)]
                assert (codes.count(200), codes.count(429)) == (most, 2 * most)
                assert admission.num_live == admission.num_prompt_tokens == 0

    asyncio.run(scene())


def test_a_stop_does_not_wait_for_ever(app: App) -> None:
    """At the deadline running requests end with an error, and silent connections are closed."""

    async def scene() -> None:
        process = Process(app)
        slow_down(app.models.all[0].llm._thread.engine, 0.1)
        fields = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "n": 8, "stream": True}
        body = json.dumps(fields).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        )
        with bind("127.0.0.1", 0) as listener:
            serving = asyncio.ensure_future(process.serve(sockets=[listener]))
            while not process.started:
                await asyncio.sleep(0.01)
            port = listener.getsockname()[1]
            (reader, writer), (silent, other), (half, slow) = [
                await asyncio.open_connection("127.0.0.1", port) for _ in range(3)
            ]
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            slow.write(f"{head}content-length: 100\r\n\r\n".encode())
            data = await reader.read(20)
            process.handle_exit(15, None)
            assert await silent.read() == b"" and not reader.at_eof()
            data += await reader.read()
            assert b" 200 OK" in data and b"shutting_down" in data
            data = await half.read()
            assert b" 503 " in data and b"shutting_down" in data
            async with asyncio.timeout(20):
                await serving
            assert process.status == 0
            for one in (writer, other, slow):
                one.close()
                await one.wait_closed()

    asyncio.run(scene())


def test_a_large_body_for_a_full_queue_is_never_read(app: App) -> None:
    async def scene() -> None:
        admission = app.models.all[0].admission
        admission.num_live = admission.num_slots + admission.max_queued
        sent: list[dict] = []

        async def receive() -> dict:
            assert sent, "the body was asked for before the answer"
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            sent.append(message)

        names = {"host": "localhost", "content-type": "application/json"}
        headers = [(name.encode(), value.encode()) for name, value in names.items()]
        for length in ([(b"content-length", b"5000000")], [(b"transfer-encoding", b"chunked")]):
            scope = {"type": "http", "method": "POST", "headers": headers + length}
            scope |= {"path": "/v1/completions", "query_string": b"", "root_path": ""}
            sent.clear()
            await app.asgi(scope, receive, send)  # type: ignore[arg-type]
            assert sent[0]["status"] == 429 and (b"connection", b"close") in sent[0]["headers"]
        admission.num_live = 0

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_whose_exception_is_lost_still_ends_the_start(
    number: signal.Signals, error: type[BaseException]
) -> None:
    """As it is in callbacks of the garbage collector."""
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        report = StartOutput(io.StringIO(), Stop())
        report.progress("weights", 1, 2)
        with pytest.raises(error):
            signal.raise_signal(number)
        with pytest.raises(error):
            report.progress("weights", 2, 2)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def test_a_bar_grows_on_a_terminal_and_a_line_is_written_elsewhere() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        report = StartOutput(stream)
        for done in (0, 5, 10):
            report.progress("compile", done, 10)
    bars = [text.partition("[")[2].partition("]")[0] for text in terminal.getvalue().split("\r")]
    assert [bar.count("#") for bar in bars] == [0, 12, 24] and {len(bar) for bar in bars} == {24}
    assert file.getvalue().count("\n") == 1 and "compile 10/10" in file.getvalue()
