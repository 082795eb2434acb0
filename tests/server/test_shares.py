"""API keys share a store fairly: a key that floods it takes no space from another."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from jaxserve.server.http.app import App
from jaxserve.server.kept.batches import UNENDED, Batches
from jaxserve.server.kept.conversation_store import Conversation, ConversationStore
from jaxserve.server.kept.files import MAX_UPLOADS, FileStore, new_file
from jaxserve.server.kept.response_store import ResponseStore, Turn
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.files import Batch, BatchRequest
from jaxserve.server.schema.response_items import InputItem
from jaxserve.server.settings import ServerConfig
from tests.server.conftest import KEYS
from tests.server.test_kept_files import Echo, line

MINE, THEIRS = "mine", "theirs"
Store = ResponseStore | ConversationStore
Kept = Turn | Conversation


def turn(owner: str, name: str, size: int, parent: Turn | None = None) -> Turn:
    answer = {"output": [{"type": "message", "role": "assistant", "content": "x" * size}]}
    return Turn(name, owner, parent, [], json.dumps(answer).encode())


def keep(store: Store, owner: str, name: str, size: int) -> Kept:
    if isinstance(store, ResponseStore):
        made = turn(owner, name, size)
        store.add(made)
        return made
    conversation = Conversation(owner, {})
    conversation.add(conversation.show_new([InputItem(content="x" * size)]))
    store.keep(conversation)
    return conversation


def is_kept(store: Store, entry: Kept) -> bool:
    name = entry.id if isinstance(entry, Turn) else entry.shown.id
    try:
        return store.get(name, entry.owner) is entry
    except ApiError:
        return False


@pytest.mark.parametrize("kind", [ResponseStore, ConversationStore])
@pytest.mark.parametrize(("count", "size"), [(1001, 10), (12, 700_000)])
def test_a_flood_of_one_key_leaves_what_another_keeps(
    kind: type[Store], count: int, size: int
) -> None:
    """Limits count items and bytes."""
    store = kind(1000, 64 << 17, 1e9)
    kept = [keep(store, MINE, f"m{n}", 1000) for n in range(20)]
    flood = [keep(store, THEIRS, f"t{n}", size) for n in range(2 * count)]
    assert all(is_kept(store, entry) for entry in kept)
    left = [is_kept(store, entry) for entry in flood]
    assert left == sorted(left) and 0 < sum(left) < count  # the oldest left
    assert len(store) <= 1000 and store.num_bytes <= 64 << 17


@pytest.mark.parametrize("kind", [ResponseStore, ConversationStore])
def test_a_key_keeps_its_equal_part_whatever_others_add(kind: type[Store]) -> None:
    """Random additions of four keys; an eviction takes the oldest item of a key above its share."""
    rng = random.Random(0)
    most, most_bytes, owners = 12, 40_000, ["a", "b", "c", "d"]
    store = kind(most, most_bytes, 1e9)
    kept: dict[str, list[Kept]] = {owner: [] for owner in owners}
    num_left = 0
    for n in range(2000):
        owner = rng.choices(owners, (1, 2, 5, 20))[0]
        kept[owner].append(keep(store, owner, str(n), rng.choice((0, 10, 3000, 9000))))
        for name in owners:
            had, kept[name] = kept[name], [e for e in kept[name] if is_kept(store, e)]
            gone = had[: len(had) - len(kept[name])]
            assert had[len(gone) :] == kept[name]
            num_left += len(gone)
            held = sum(entry.num_bytes for entry in had)
            assert not gone or len(had) > most / 4 or held > most_bytes / 4
        assert len(store) <= most and store.num_bytes <= most_bytes
        assert len(store) == sum(map(len, kept.values()))
        assert store.num_bytes == sum(e.num_bytes for own in kept.values() for e in own)
    assert num_left > 1000


def test_answers_in_progress_of_one_key_push_out_nothing_of_another() -> None:
    store = ResponseStore(4, 10**6, 1e9)
    mine = [turn(MINE, f"m{n}", 10) for n in range(2)]
    theirs = [turn(THEIRS, f"t{n}", 10) for n in range(9)]
    for one_turn in theirs:
        one_turn.cancel = lambda: None
    for one_turn in mine + theirs:
        store.add(one_turn)
    assert all(is_kept(store, one_turn) for one_turn in mine + theirs)
    for one_turn in theirs:
        one_turn.cancel = None
        store.resize(one_turn)
    assert [is_kept(store, t) for t in mine] == [True, True]
    assert [is_kept(store, t) for t in theirs] == [False] * 7 + [True] * 2


def test_a_conversation_that_was_forgotten_counts_for_its_key() -> None:
    """A response keeps earlier responses alive; they do not count for another key."""
    store = ResponseStore(1000, 100_000, 1e9)
    mine = turn(MINE, "m", 30_000)
    store.add(mine)
    last: Turn | None = None
    for n in range(20):
        last = turn(THEIRS, f"t{n}", 10_000, last)
        store.add(last)
    assert is_kept(store, mine) and store.num_bytes <= 100_000


def test_ids_of_one_key_are_free_for_another() -> None:
    store = ResponseStore(10, 10**6, 1e9)
    mine, theirs = turn(MINE, "same", 10), turn(THEIRS, "same", 10)
    store.add(mine)
    store.add(theirs)
    assert is_kept(store, mine) and is_kept(store, theirs)
    store.remove(theirs)
    assert is_kept(store, mine) and len(store) == 1


def shared(folder: Path, keys: int = 2, **limits: Any) -> FileStore:
    names = [f"key{n}" for n in range(keys)]
    return FileStore(ServerConfig(files_dir=str(folder), api_key=[*names, names[0]], **limits))


def upload(store: FileStore, owner: str | None, data: bytes) -> str:
    with store.receive(owner) as upload:
        upload.write(data)
        upload.flush(new_file("a", "batch", None))
        return upload.keep().id


def upload_many(store: FileStore, owner: str | None, size: int) -> None:
    for _ in range(100):
        upload(store, owner, b"x" * size)


def flood(store: FileStore, owner: str | None, size: int) -> tuple[int, str]:
    """Upload until a refusal, and return the number of files and the refusal."""
    count = len(store.list(owner, None))
    with pytest.raises(ApiError) as refused:
        upload_many(store, owner, size)
    assert refused.value.status == 413 and refused.value.param == "file"
    return len(store.list(owner, None)) - count, str(refused.value)


def test_each_key_has_its_part_of_the_files(tmp_path: Path) -> None:
    store = shared(tmp_path, max_files=21, max_files_bytes=101_000, max_file_bytes=90_000)
    count, message = flood(store, THEIRS, 0)
    assert count == 10 and message == "a key keeps at most 10 files: delete some"
    count, message = flood(store, MINE, 20_000)
    assert count == 2
    assert message == "this key's files would take more than 50500 bytes: delete some"
    for file in store.list(MINE, None):
        store.remove(file.id)
    upload(store, MINE, b"x" * 50_500)
    for file in store.list(THEIRS, None):
        store.remove(file.id)
    upload(store, THEIRS, b"x" * 50_500)
    # The parts count after a start as well.
    store.close()
    store = shared(tmp_path, max_files=21, max_files_bytes=101_000, max_file_bytes=90_000)
    assert flood(store, MINE, 1)[0] == flood(store, THEIRS, 1)[0] == 0
    store.close()


def test_each_key_has_one_file_and_one_upload_at_least(tmp_path: Path) -> None:
    store = shared(tmp_path, MAX_UPLOADS + 3, max_files=2)
    owners = [f"owner {n}" for n in range(MAX_UPLOADS + 3)]
    with ExitStack() as stack:
        for owner in owners:
            stack.enter_context(store.receive(owner))
            with pytest.raises(ApiError, match="1 files are being received"):
                store.receive(owner)
    assert [flood(store, owner, 1)[0] for owner in owners] == [1] * len(owners)
    store.close()


def test_files_of_earlier_keys_count_for_all(tmp_path: Path) -> None:
    limits = {"max_files": 4, "max_files_bytes": 1000}
    store = shared(tmp_path, 1, **limits)
    assert flood(store, None, 300)[0] == 3
    store.close()
    store = shared(tmp_path, 2, **limits)
    with pytest.raises(ApiError, match="the files would take more than 1000 bytes"):
        upload(store, MINE, b"x" * 300)
    assert flood(store, MINE, 0) == (1, "the server keeps at most 4 files: delete some")
    store.close()


class Waiting(Echo):
    """A service without a free slot."""

    async def enter(self, model: str | None) -> None:
        await asyncio.Event().wait()


def input_of(store: FileStore, owner: str, num_lines: int = 1) -> str:
    texts = (line(f"n {n}", "a", "/v1/completions") for n in range(num_lines))
    return upload(store, owner, "\n".join(texts).encode())


async def create(batches: Batches, file: str, owner: str) -> Batch:
    request = BatchRequest(input_file_id=file, endpoint="/v1/completions", completion_window="24h")
    return await batches.create(request, owner)


@pytest.mark.parametrize(("most", "keys", "own"), [(16, 2, 8), (5, 2, 2), (1, 3, 1), (3, 1, 3)])
def test_each_key_has_its_part_of_the_batches(
    tmp_path: Path, most: int, keys: int, own: int
) -> None:
    store = shared(tmp_path, keys, max_batches=most)
    owners = [f"owner {n}" for n in range(keys)]

    async def all_of_them() -> None:
        batches = Batches(store, Waiting(10))
        for owner in owners:
            file = input_of(store, owner)
            for _ in range(own):
                await create(batches, file, owner)
            with pytest.raises(ApiError, match=f"{own} batches.* have not ended") as refused:
                await create(batches, file, owner)
            assert refused.value.status == 429
        await batches.stop()

    asyncio.run(all_of_them())
    store.close()


async def ended(batches: Batches, file: str, owner: str) -> Batch:
    batch = await create(batches, file, owner)
    while batch.status in UNENDED:
        await asyncio.sleep(0.001)
    return batch


def test_answers_of_one_key_leave_room_for_those_of_another(tmp_path: Path) -> None:
    store = shared(tmp_path, max_files_bytes=200_000)

    async def all_of_them() -> tuple[Batch, Batch]:
        batches = Batches(store, Echo(5000))
        theirs = await ended(batches, input_of(store, THEIRS, 40), THEIRS)
        return theirs, await ended(batches, input_of(store, MINE, 10), MINE)

    theirs, mine = asyncio.run(all_of_them())
    assert mine.status == "completed" and theirs.status == "failed" and theirs.errors
    [problem] = theirs.errors.data
    assert problem.code == "storage_full" and "each key has an equal part" in problem.message
    assert sum(file.bytes for file in store.list(THEIRS, None)) <= 100_000
    store.close()


def test_batches_of_one_key_that_ended_leave_those_of_another(tmp_path: Path) -> None:
    store = shared(tmp_path, max_files=6)

    async def all_of_them() -> None:
        batches = Batches(store, Echo(10))
        mine = await ended(batches, input_of(store, MINE), MINE)
        file = input_of(store, THEIRS)
        theirs = []
        for _ in range(12):
            batch = await ended(batches, file, THEIRS)
            theirs.append(batch.id)
            for made in store.list(THEIRS, "batch_output"):
                store.remove(made.id)
        assert [batch.id for batch in batches.list(MINE)] == [mine.id]
        assert [batch.id for batch in batches.list(THEIRS)] == theirs[-5:]

    asyncio.run(all_of_them())
    assert len(list((tmp_path / "batches").glob("*.json"))) == 6
    store.close()


def ask(app: App, method: str, path: str, key: str | None = None, **sent: Any) -> httpx2.Response:
    async def answer() -> httpx2.Response:
        transport = httpx2.ASGITransport(app.asgi)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        base: Any = {"transport": transport, "base_url": "http://127.0.0.1", "headers": headers}
        async with httpx2.AsyncClient(**base) as client:
            return await client.request(method, path, **sent)

    return asyncio.run(answer())


def test_keys_share_over_http_too(make_app: Callable[..., App], tmp_path: Path) -> None:
    limits = {"max_stored_responses": 4, "max_files": 4}
    app = make_app(api_key=list(KEYS), files_dir=str(tmp_path), **limits)
    conversations, responses = "/v1/conversations", "/v1/responses"
    mine, theirs = KEYS
    body = {"input": "a", "max_output_tokens": 1}
    form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("a", b"x")}}
    kept = [
        f"{path}/{ask(app, 'POST', path, mine, **sent).json()['id']}"
        for path, sent in ((conversations, {"json": {}}), (responses, {"json": body}))
    ]
    for _ in range(6):
        assert ask(app, "POST", conversations, theirs, json={}).status_code == 200
        assert ask(app, "POST", responses, theirs, json=body).status_code == 200
    assert [ask(app, "GET", path, mine).status_code for path in kept] == [200, 200]
    for key in (theirs, mine):
        answers = [ask(app, "POST", "/v1/files", key, **form).status_code for _ in range(3)]
        assert answers == [200, 200, 413]
    assert app.files is not None
    app.files.close()


@pytest.mark.parametrize(
    ("fields", "status"),
    [({}, 404), ({"server_dev_mode": True}, 200), ({"api_key": list(KEYS)}, 401)],
    ids=str,
)
def test_the_server_shows_its_settings_to_operators_alone(
    make_app: Callable[..., App], fields: dict[str, Any], status: int
) -> None:
    app = make_app(**fields)
    for path in ("/server_info", "/get_server_info", "/server_info?config_format=json"):
        answer = ask(app, "GET", path)
        assert answer.status_code == status, answer.text
        if status == 404:
            error = answer.json()["error"]
            assert error["code"] == "not_supported"
            name = path.partition("?")[0]
            assert error["message"].startswith(f"{name} is not served: it is with --server-dev")
