"""Files and batches: as the official client sees them, after a crash, and with bad input."""

from __future__ import annotations

import asyncio
import io
import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.server.kept.batch_lines import BatchResponse, Line, scan
from jaxserve.server.kept.batches import UNENDED, Batches
from jaxserve.server.kept.files import FileStore, new_file
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.files import Batch, BatchRequest
from jaxserve.server.settings import ServerConfig
from tests.server.test_kept_responses import to
from tests.support.live_server import SMALL, Canary, Server

MODEL, WORDS = "demo_model", ["abc", "stone", "horse", "lamp", "grey", "book", "tree", "cloud"]
CHAT = "/v1/chat/completions"
LIMITS = "--max-file-bytes 100000 --max-files-bytes 400000 --max-batch-lines 50 --max-batches 2"


def arguments(folder: Path) -> list[str]:
    return [*SMALL, *LIMITS.split(), "--files-dir", str(folder)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("kept")
    with Server(arguments(folder / "files")) as server:
        yield server


@pytest.fixture(scope="module")
def first(running: Server) -> Canary:
    return Canary(running)


@pytest.fixture
def files(running: Server, first: Canary) -> Iterator[Server]:
    """Return a server that keeps files, and check after each test that it is unchanged."""
    yield running
    first.check()


@pytest.fixture
def client(files: Server) -> Iterator[openai.OpenAI]:
    with to(files) as client:
        yield client


def line(name: str, word: str, url: str = CHAT, **more: Any) -> str:
    text = "Reverse: " + "-".join(word)
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, **more}
    body |= {
        CHAT: {"messages": [{"role": "user", "content": text}]},
        "/v1/completions": {"prompt": text},
        "/v1/responses": {"input": text},
    }[url]
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def send(client: openai.OpenAI, lines: list[str] | str, name: str = "in.jsonl") -> str:
    text = lines if isinstance(lines, str) else "\n".join(lines)
    return client.files.create(file=(name, io.BytesIO(text.encode())), purpose="batch").id


def begin(client: openai.OpenAI, file: str, endpoint: Any = CHAT, **more: Any) -> Any:
    return client.batches.create(
        input_file_id=file, endpoint=endpoint, completion_window="24h", **more
    )


def ended(client: openai.OpenAI, name: str, seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        batch = client.batches.retrieve(name)
        if batch.status not in ("validating", "in_progress", "finalizing", "cancelling"):
            return batch
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)


def rows(client: openai.OpenAI, file: str | None) -> list[dict[str, Any]]:
    assert file is not None
    return [json.loads(text) for text in client.files.content(file).text.splitlines()]


def clear(client: openai.OpenAI) -> None:
    for file in list(client.files.list()):
        client.files.delete(file.id)


def test_files_are_kept_listed_and_deleted(client: openai.OpenAI) -> None:
    clear(client)
    data = b"".join(bytes([n % 256]) * 97 for n in range(700))
    after: Any = {"anchor": "created_at", "seconds": 3600}
    made = client.files.create(
        file=("../../etc/passwd\n", data), purpose="batch", expires_after=after
    )
    assert (made.object, made.bytes, made.purpose) == ("file", len(data), "batch")
    assert made.filename.startswith("../../etc/passwd") and made.filename.isprintable()
    assert made.expires_at == made.created_at + 3600
    assert client.files.content(made.id).content == data
    assert client.files.retrieve(made.id) == made
    others = [send(client, f"{n}") for n in range(4)]
    names = {made.id, *others}
    assert {file.id for file in client.files.list(limit=2)} == names
    assert {file.id for file in client.files.list(purpose="batch")} == names
    assert list(client.files.list(purpose="batch_output")) == []
    page = client.files.list(limit=2, order="asc")
    assert len(page.data) == 2 and page.has_more
    assert client.files.delete(made.id).deleted
    for call in (client.files.retrieve, client.files.delete, client.files.content):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    assert {file.id for file in client.files.list()} == set(others)
    clear(client)


@pytest.mark.parametrize("url", [CHAT, "/v1/completions", "/v1/responses"])
def test_a_batch_is_answered(client: openai.OpenAI, url: str) -> None:
    clear(client)
    lines = [line(f"n {n}", word, url) for n, word in enumerate(WORDS)]
    lines.insert(3, line("bad", "abc", url, temperature=-1))
    made = begin(client, send(client, lines), url, metadata={"a": "b"})
    assert made.status == "validating" and made.object == "batch" and made.metadata == {"a": "b"}
    assert made.expires_at == made.created_at + 24 * 3600
    batch = ended(client, made.id)
    assert batch.status == "completed" and batch.errors is None, batch
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (9, 8, 1)
    good, bad = rows(client, batch.output_file_id), rows(client, batch.error_file_id)
    assert sorted(row["custom_id"] for row in good) == [f"n {n}" for n in range(8)]
    for row in good:
        word, body = WORDS[int(row["custom_id"][2:])], row["response"]["body"]
        assert row["error"] is None and row["response"]["status_code"] == 200
        if url == CHAT:
            said = body["choices"][0]["message"]["content"]
            assert said == "-".join(reversed(word))
    assert [row["custom_id"] for row in bad] == ["bad"]
    assert bad[0]["response"]["body"]["error"]["param"] == "temperature"
    used = [row["response"]["body"]["usage"]["total_tokens"] for row in good]
    assert batch.usage.total_tokens == sum(used)
    assert [file.purpose for file in client.files.list(purpose="batch_output")] == [
        "batch_output"
    ] * 2
    assert client.files.retrieve(batch.output_file_id).filename == f"{batch.id}_output.jsonl"
    assert client.batches.list(limit=1).data[0].id == batch.id
    assert batch.id in [listed.id for listed in client.batches.list(limit=2)]
    with pytest.raises(openai.BadRequestError, match="completed cannot be cancelled"):
        client.batches.cancel(batch.id)


BAD_FILES: list[tuple[list[str], str, int | None]] = [
    ([], "empty_file", None),
    (["not json"], "invalid_json", 1),
    ([line("a", "abc"), "[1]"], "invalid_line", 2),
    ([line("a", "abc"), line("a", "abc")], "duplicate_custom_id", 2),
    ([line("a", "abc", "/v1/completions")], "mismatched_url", 1),
    ([line("a", "abc", stream=True)], "invalid_request", 1),
    ([line("a", "abc").replace("POST", "GET")], "invalid_method", 1),
    ([line("a", "abc").replace(CHAT, "/v1/embeddings")], "invalid_url", 1),
    ([line("a" * 513, "abc")], "invalid_line", 1),
    (["{}"] * 51, "too_many_lines", None),
]


@pytest.mark.parametrize(("lines", "code", "number"), BAD_FILES)
def test_a_bad_file_fails_its_batch(
    client: openai.OpenAI, lines: list[str], code: str, number: int | None
) -> None:
    clear(client)
    batch = ended(client, begin(client, send(client, lines)).id)
    assert batch.status == "failed" and batch.failed_at and batch.output_file_id is None
    [problem] = batch.errors.data
    assert (problem.code, problem.line) == (code, number)


def form(*parts: tuple[str, bytes]) -> tuple[bytes, dict[str, str]]:
    body = b"".join(
        b"--xx\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + data + b"\r\n"
        for head, data in parts
    )
    return body + b"--xx--\r\n", {"content-type": "multipart/form-data; boundary=xx"}


FILE, PURPOSE = ('name="file"; filename="a"', b"{}"), ('name="purpose"', b"batch")
BAD_FORMS: list[tuple[tuple[bytes, dict[str, str]], int, str | None]] = [
    (form(FILE), 400, "purpose"),
    (form(FILE, ('name="purpose"', b"vision")), 400, "purpose"),
    (form(PURPOSE), 400, "file"),
    (form(PURPOSE, FILE, FILE), 400, "file"),
    (form(PURPOSE, ('name="image"; filename="a"', b"")), 400, "file"),
    (form(PURPOSE, FILE, ('name="expires_after[seconds]"', b"1")), 400, "expires_after"),
    (form(PURPOSE, FILE, ('name="a"', b"x" * 1025)), 400, "a"),
    (form(*[PURPOSE] * 17, FILE), 400, None),
    (form(PURPOSE, ("filename=a", b"")), 400, None),
    (form(PURPOSE, ('name="file"; filename="a"', b"x" * 100_001)), 413, "file"),
    (form(PURPOSE, ('name="file"; filename="a"', b"x" * 10**6)), 413, "file"),
    ((form(PURPOSE, FILE)[0][:-8], form()[1]), 400, None),
    ((b"garbage", form()[1]), 400, None),
    ((form(PURPOSE, FILE)[0], {"content-type": "multipart/form-data"}), 400, None),
    ((b"{}", {"content-type": "application/json"}), 415, None),
]


@pytest.mark.parametrize(("sent", "status", "name"), BAD_FORMS)
def test_a_bad_form_is_refused_and_leaves_nothing(
    files: Server, sent: tuple[bytes, dict[str, str]], status: int, name: str | None
) -> None:
    before = files.request("/v1/files").json()
    answer = files.request("/v1/files", *sent)
    assert (answer.status, answer.error["param"]) == (status, name), answer.body
    assert files.request("/v1/files").json() == before
    [folder] = [word for word in files.arguments if word.endswith("/files")]
    assert list((Path(folder) / "incoming").iterdir()) == []


def test_all_files_are_bounded_together(client: openai.OpenAI) -> None:
    clear(client)
    for _ in range(4):
        send(client, "x" * 90_000)
    with pytest.raises(openai.APIStatusError, match="more than 400000 bytes") as refused:
        send(client, "x" * 90_000)
    assert refused.value.status_code == 413
    clear(client)
    send(client, "x" * 90_000)
    clear(client)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "name"),
    [
        ("GET", "/v1/files/file-0", None, 404, "file_id"),
        ("GET", "/v1/files/..%5c..", None, 404, "file_id"),
        ("GET", "/v1/files/%2e%2e", None, 404, "file_id"),
        ("GET", f"/v1/files/file-{'0' * 32}/content", None, 404, "file_id"),
        ("DELETE", "/v1/files/lock", None, 404, "file_id"),
        ("GET", "/v1/files?limit=0", None, 400, "limit"),
        ("GET", "/v1/files?purpose=all", None, 400, "purpose"),
        ("GET", "/v1/files?after=x", None, 400, "after"),
        ("GET", "/v1/batches/batch_0", None, 404, "batch_id"),
        ("POST", "/v1/batches/batch_0/cancel", None, 404, "batch_id"),
        ("GET", "/v1/batches?limit=101", None, 400, "limit"),
        ("POST", "/v1/batches", {}, 400, "input_file_id"),
        ("POST", "/v1/batches", {"input_file_id": 7}, 400, "input_file_id"),
        ("POST", "/v1/batches", {"input_file_id": "file-0"}, 404, "input_file_id"),
        ("POST", "/v1/batches", {"input_file_id": "../lock"}, 404, "input_file_id"),
        ("POST", "/v1/batches", {"endpoint": "/v1/embeddings"}, 400, "endpoint"),
        ("POST", "/v1/batches", {"completion_window": "1h"}, 400, "completion_window"),
        ("POST", "/v1/batches", {"metadata": {"a": "x" * 513}}, 400, "metadata"),
        (
            *("POST", "/v1/batches"),
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
            *(400, "output_expires_after"),
        ),
    ],
    ids=str,
)
def test_a_bad_request_is_refused(
    files: Server, method: str, path: str, body: Any, status: int, name: str
) -> None:
    if body:
        good = {"input_file_id": "file-0", "endpoint": CHAT, "completion_window": "24h"}
        body = {**good, **body}
    answer = files.request(path, body, method=method)
    assert (answer.status, answer.error["param"]) == (status, name), answer.body


def test_files_are_off_without_a_folder(server: Server) -> None:
    for method, path in (("POST", "/v1/files"), ("GET", "/v1/files"), ("POST", "/v1/batches")):
        answer = server.request(path, {} if method == "POST" else None, method=method)
        assert answer.status == 404 and answer.error["code"] == "not_supported"
        assert "--files-dir FOLDER" in answer.error["message"]


def test_a_batch_is_cancelled_gives_way_and_survives_a_crash(tmp_path: Path) -> None:
    """In one server of one slot after the other, whose steps are slow."""
    folder = tmp_path / "files"
    narrow = "--max-num-seqs 2 --decode-sizes 2 --max-num-queued-reqs 0 --max-batch-lines 50"
    given = [*SMALL, *narrow.split(), "--max-stored-responses", "0", "--files-dir", str(folder)]
    lines = [line(f"n {n}", word, max_tokens=5) for n, word in enumerate(WORDS * 2)]
    with Server(given, module="tests.support.slow_server") as server, to(server) as client:
        keeps_no_responses(server)
        file = send(client, lines)
        doomed = begin(client, file)
        wait_for_answers(client, doomed.id, 2)
        with pytest.raises(openai.BadRequestError, match=doomed.id):
            client.files.delete(file)
        # A queue of length 0 leaves two places, and a batch takes neither of them from other
        # requests.
        one, two = (server.open_drawing({"prompt": [5], "stream": True}) for _ in range(2))
        one.close()
        two.close()
        assert client.batches.cancel(doomed.id).status == "cancelling"
        batch = ended(client, doomed.id)
        assert batch.status == "cancelled" and batch.cancelled_at
        assert len(rows(client, batch.output_file_id)) == batch.request_counts.completed >= 2
        assert batch.request_counts.completed < len(lines)
        killed = begin(client, file)
        wait_for_answers(client, killed.id, 3)
        server.process.kill()
        server.process.wait()
    [path] = (folder / "batches").glob("*.output")
    whole = path.read_bytes()
    assert whole.count(b"\n") >= 3
    path.write_bytes(whole[: whole.rindex(b"\n", 0, -1) + 40])  # a line that is torn
    expired = folder / "batches" / f"{doomed.id}.json"
    record = json.loads(expired.read_text())
    record["batch"] |= {"status": "in_progress", "cancelling_at": None, "cancelled_at": None}
    record["batch"] |= {"expires_at": 7, "output_file_id": None, "error_file_id": None}
    expired.write_text(json.dumps(record))
    with Server(given, module="tests.support.slow_server") as server, to(server) as client:
        batch = ended(client, killed.id)
        assert batch.status == "completed" and batch.request_counts.completed == len(lines)
        answers = rows(client, batch.output_file_id)
        assert sorted(row["custom_id"] for row in answers) == sorted(
            f"n {n}" for n in range(len(lines))
        )
        kept = whole.splitlines()[:-1]
        assert kept == client.files.content(batch.output_file_id).content.splitlines()[: len(kept)]
        batch = ended(client, doomed.id)
        assert batch.status == "expired" and batch.expired_at and batch.output_file_id is None
        assert {row["error"]["code"] for row in rows(client, batch.error_file_id)} == {
            "batch_expired"
        }
        # An orderly end leaves a batch to the next start.
        later = begin(client, file)
        wait_for_answers(client, later.id, 1)
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
    record = json.loads((folder / "batches" / f"{later.id}.json").read_text())
    assert record["batch"]["status"] == "in_progress"


def test_a_folder_belongs_to_one_server_and_keeps_what_is_whole(tmp_path: Path) -> None:
    config = ServerConfig(files_dir=str(tmp_path / "kept"))
    store = FileStore(config)
    with pytest.raises(InvalidRequest, match="another server uses"):
        FileStore(config)
    made = []
    for text in (b"one", b"two", b"three"):
        with store.receive() as upload:
            upload.write(text)
            upload.flush(new_file("a", "batch", 3600))
            made.append(upload.keep())
    one, two, three = (file.id for file in made)
    with store.receive() as upload:
        upload.write(b"given up")
    (tmp_path / "kept" / "incoming").rmdir()
    with pytest.raises(FileNotFoundError), store.receive():
        pass
    (tmp_path / "kept" / "incoming").mkdir()
    assert store.num_bytes == 11 and not store.uploads.total()
    store.close()
    # As a crash leaves them: bytes without a record, a record without bytes, half of a file.
    store.path(one).with_suffix(".json").unlink()
    store.path(two).unlink()
    (tmp_path / "kept" / "incoming" / "x.upload").write_bytes(b"half")
    (tmp_path / "kept" / "files" / "theirs.txt").write_bytes(b"not ours")
    store = FileStore(config)
    assert [file.id for file in store.list(None, None)] == [three] and store.num_bytes == 5
    names = {path.name for path in (tmp_path / "kept" / "files").iterdir()}
    assert names == {f"{three}.data", f"{three}.json", "theirs.txt"}
    assert not list((tmp_path / "kept" / "incoming").iterdir())
    assert os.stat(tmp_path / "kept" / "files").st_mode & 0o77 == 0
    store.get(three, None).file.expires_at = 1
    assert store.list(None, None) == [] and store.num_bytes == 0
    store.close()


def test_a_file_is_seen_by_its_owner(tmp_path: Path) -> None:
    store = FileStore(ServerConfig(files_dir=str(tmp_path)))
    with store.receive("mine") as upload:
        upload.flush(new_file("a", "batch", None))
        file = upload.keep()
    assert store.get(file.id, "mine").file.id == file.id
    with pytest.raises(ApiError, match="No such File"):
        store.get(file.id, "other")
    assert store.list("other", None) == [] and len(store.list("mine", None)) == 1
    store.close()


class Echo:
    """Answers of one size, from an engine that may have ended."""

    def __init__(self, size: int, status: int = 200) -> None:
        self.size, self.status = size, status
        self.num_answered = 0

    def is_alive(self, model: str | None) -> bool:
        return self.status == 200

    async def answer(self, line: Line, owner: str | None = None) -> BatchResponse:
        await asyncio.sleep(0)
        body = msgspec.Raw(json.dumps({"text": "x" * self.size}).encode())
        self.num_answered += 1
        return BatchResponse(self.status, "r", body)

    async def enter(self, model: str | None) -> None:
        await asyncio.sleep(0)

    def leave(self, model: str | None) -> None:
        pass


def input_of(store: FileStore, num_lines: int) -> str:
    with store.receive() as upload:
        for n in range(num_lines):
            upload.write(line(f"n {n}", "a", "/v1/completions").encode() + b"\n")
        upload.flush(new_file("a", "batch", None))
        return upload.keep().id


async def whole_batch(batches: Batches, file: str) -> Batch:
    batch = await created(batches, file)
    while batch.status in UNENDED:
        await asyncio.sleep(0.01)
    return batch


async def created(batches: Batches, file: str) -> Batch:
    request = BatchRequest(input_file_id=file, endpoint="/v1/completions", completion_window="24h")
    return await batches.create(request, None)


async def go_on(store: FileStore, name: str) -> Batch:
    batches = Batches(store, Echo(10))
    batches.start()
    batch = batches.get(name, None)
    while batch.status in UNENDED:
        await asyncio.sleep(0.01)
    return batch


def test_answers_that_cannot_be_written_fail_their_batch(tmp_path: Path) -> None:
    """Covers a disk that refuses writes, and files that have reached their total limit."""
    store = FileStore(ServerConfig(files_dir=str(tmp_path), max_files_bytes=100_000))
    file = input_of(store, 40)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most, code in ((12_000, "storage"), (limits[0], "storage_full")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        try:
            batch = asyncio.run(whole_batch(Batches(store, Echo(5000)), file))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert batch.status == "failed" and batch.errors is not None
        assert [problem.code for problem in batch.errors.data] == [code]
        assert batch.output_file_id is not None
        answers = store.path(batch.output_file_id).read_bytes()
        assert answers.endswith(b"\n")
        assert len(answers.splitlines()) == batch.request_counts.completed > 0
        kept = sum(path.stat().st_size for path in (tmp_path / "files").glob("*.data"))
        assert store.num_bytes == kept <= 100_000
    store.close()


def test_lines_of_an_engine_that_dies_are_drawn_again(tmp_path: Path) -> None:
    store = FileStore(ServerConfig(files_dir=str(tmp_path)))
    file = input_of(store, 3)

    async def die() -> Batch:
        service = Echo(10, status=500)
        batches = Batches(store, service)
        batch = await created(batches, file)
        while service.num_answered < 3:
            await asyncio.sleep(0)
        await batches.stop()
        return batch

    batch = asyncio.run(die())
    assert batch.status == "in_progress" and batch.request_counts.failed == 0
    batch = asyncio.run(go_on(store, batch.id))
    assert batch.status == "completed" and batch.request_counts.completed == 3
    store.close()


def test_answers_that_cannot_become_files_are_not_lost(tmp_path: Path) -> None:
    store = FileStore(ServerConfig(files_dir=str(tmp_path)))
    file = input_of(store, 3)

    async def fail() -> Batch:
        batches = Batches(store, Echo(10))
        batch = await created(batches, file)
        while batch.status != "in_progress":
            await asyncio.sleep(0)
        while batch.request_counts.completed < 3:
            await asyncio.sleep(0)
        (tmp_path / "files").rename(tmp_path / "away")
        while batch.status != "finalizing":
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await batches.stop()
        return batch

    batch = asyncio.run(fail())
    assert batch.status == "finalizing" and batch.output_file_id is None
    (tmp_path / "away").rename(tmp_path / "files")
    batch = asyncio.run(go_on(store, batch.id))
    assert batch.status == "completed" and batch.output_file_id is not None
    assert store.path(batch.output_file_id).read_bytes().count(b"\n") == 3
    assert not list((tmp_path / "batches").glob("*.output"))
    store.close()


def keeps_no_responses(server: Server) -> None:
    made = server.request("/v1/responses", {"input": "a", "max_output_tokens": 1}).json()
    assert made["store"] is False
    answer = server.request(f"/v1/responses/{made['id']}")
    assert answer.status == 404 and "--max-stored-responses" in answer.error["message"]
    answer = server.request("/v1/responses", {"input": "a", "background": True})
    assert answer.status == 400 and answer.error["param"] == "background"


def wait_for_answers(client: openai.OpenAI, name: str, least: int) -> None:
    deadline = time.monotonic() + 60
    while client.batches.retrieve(name).request_counts.completed < least:  # type: ignore
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_numbers_of_lines_are_those_of_the_file(tmp_path: Path) -> None:
    """Blank lines and long ones count too, and a byte-order mark belongs to no line."""
    good = line("a", "a", "/v1/completions").encode()
    texts = [b"\xef\xbb\xbf" + good, b"", b"  \r", b"{", b"", b"x" * 9000, b"[]"]
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(texts))
    total, problems = scan(path, "/v1/completions", 100, 8000)
    assert total == 4
    assert [(problem.line, problem.code) for problem in problems] == [
        *((4, "invalid_json"), (6, "line_too_long"), (7, "invalid_line")),
    ]
    path.write_bytes(b"\xef\xbb\xbf\n" + good)
    assert scan(path, "/v1/completions", 100, 8000) == (1, [])
    path.write_bytes(good + b"\n\xef\xbb\xbf" + good)  # elsewhere it is a mistake
    [problem] = scan(path, "/v1/completions", 100, 8000)[1]
    assert (problem.line, problem.code) == (2, "invalid_json")
