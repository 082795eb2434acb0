"""Weight updates, pause and sleep over HTTP."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from safetensors.numpy import save

from jaxserve.errors import InvalidRequest
from jaxserve.fleet.options import check_server
from jaxserve.server.http.app import App
from jaxserve.server.served.models import Models
from jaxserve.server.settings import ServerConfig
from jaxserve.settings.config import bundled_model
from jaxserve.weights.checkpoint import open_checkpoint
from jaxserve.weights.safetensors import read_tensor
from tests.server import test_kept_files
from tests.server.conftest import KEYS
from tests.server.test_kept_responses import to
from tests.support.live_server import SMALL, Answer, Canary, Server, read_stream

BYTES = {"content-type": "application/octet-stream"}
START, UPDATE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"
PROMPT, NORM = "Reverse: s-t-o-n-e", "model.norm.weight"
POSTS = (
    *("/pause", "/resume", "/sleep", "/wake_up", START, UPDATE, FINISH),
    "/init_weight_transfer_engine",
)
GETS = "/is_paused", "/is_sleeping", "/get_world_size"

FIRST = {
    name: read_tensor(entry) for name, entry in open_checkpoint(bundled_model()).tensors.items()
}


def noisy(array: np.ndarray, seed: int) -> np.ndarray:
    factors = 1 + 0.3 * np.random.default_rng(seed).standard_normal(array.shape)
    return (array * factors).astype(np.float32)


SECOND = {name: noisy(array, seed) for seed, (name, array) in enumerate(FIRST.items())}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with both checkpoints, and links to files outside of it."""
    outside = tmp_path_factory.mktemp("outside")
    (outside / "model.safetensors").write_bytes(save(SECOND))
    folder = outside.parent / "root"
    shutil.copytree(bundled_model(), folder / "first")
    shutil.copytree(bundled_model(), folder / "second")
    (folder / "second" / "model.safetensors").write_bytes(save(SECOND))
    (folder / "a" / "model").mkdir(parents=True)
    (folder / "a" / "model" / "model.safetensors").write_bytes(save(SECOND)[:-2])
    (folder / "link").symlink_to(outside)
    (folder / "inner").mkdir()
    (folder / "inner" / "model.safetensors").symlink_to(outside / "model.safetensors")
    (folder / "linked").mkdir()
    (folder / "linked" / "model.safetensors").symlink_to(folder / "second" / "model.safetensors")
    (folder / "within").symlink_to(folder / "second")
    return folder


@pytest.fixture(scope="module")
def running(root: Path) -> Iterator[Server]:
    words = ["--enable-weight-updates", "--api-key", KEYS[0], "--weights-root", str(root)]
    words += ["--files-dir", str(root.parent / "files")]
    with Server([*SMALL, *words], key=KEYS[0], module="tests.support.slow_server") as server:
        yield server


@pytest.fixture(scope="module")
def canary(running: Server) -> Canary:
    return Canary(running)


@pytest.fixture
def updated(running: Server, canary: Canary) -> Iterator[Server]:
    """Return a server of the first weights, and check after each test that they serve again."""
    yield running
    if version(running) != "0":
        good(running, f"{START}?restart=true")
        good(running, UPDATE, {"model_path": "first"})
        good(running, f"{FINISH}?version=0")
    canary.check()


def good(server: Server, path: str, body: Any = None, **headers: str) -> Any:
    answer = server.request(path, body, headers, None if path in GETS else "POST")
    assert answer.status == 200, answer.body
    return answer.json()


def send(server: Server, params: dict[str, np.ndarray] | bytes) -> Answer:
    data = params if isinstance(params, bytes) else save(params)
    return server.request(UPDATE, data, BYTES)


def draw(server: Server) -> dict[str, Any]:
    answer = server.complete(PROMPT, 12, return_token_ids=True, ignore_eos=True)
    assert answer.status == 200, answer.body
    return answer.json()


def tokens(server: Server) -> list[int]:
    return draw(server)["choices"][0]["token_ids"]


def version(server: Server) -> str:
    return server.complete(PROMPT, 1).json()["weight_version"]


def halves(params: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Return tensors in two parts, which divide the fused parameters."""
    return [{name: params[name] for name in sorted(params)[first::2]} for first in (0, 1)]


def test_bytes_in_two_calls(updated: Server, root: Path) -> None:
    before = tokens(updated)
    assert good(updated, START) == {"message": "Weight update started"}
    for half in halves(SECOND):
        assert send(updated, half).json() == {"message": "Weights updated"}
        found = draw(updated)
        assert found["weight_version"] == "0" and found["choices"][0]["token_ids"] == before
    done = good(updated, f"{FINISH}?version=step-1&running=keep")
    assert done == {"message": "Weight update finished", "weight_version": "step-1"}
    found = draw(updated)
    assert found["weight_version"] == "step-1"
    ids, prompt = (found["choices"][0][n] for n in ("token_ids", "prompt_token_ids"))
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(root / "second", dtype=torch.float64)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == ids != before


def test_a_folder(updated: Server) -> None:
    before = tokens(updated)
    for name in ("second", "within"):
        good(updated, START)
        good(updated, UPDATE, {"model_path": name})
        given = good(updated, FINISH, {"weight_version": name})
        assert given["weight_version"] == version(updated) == name
        assert tokens(updated) != before
    good(updated, START)
    good(updated, UPDATE, {"model_path": "first"})
    number = int(updated.metric("weight_updates_total"))
    assert good(updated, FINISH)["weight_version"] == str(number + 1)
    assert tokens(updated) == before
    good(updated, START)
    good(updated, f"{FINISH}?version=0")


WRONG: dict[str, tuple[bytes, str]] = {
    "nan": (
        save({NORM: FIRST[NORM] * np.float32("nan")}),
        "body: tensor 'model.norm.weight': holds",
    ),
    "part": (
        save({"model.layers.0.self_attn.q_proj.weight": np.full((128, 128), np.inf, np.float32)}),
        "body: tensor 'model.layers.0.self_attn.q_proj.weight' holds NaN or infinity",
    ),
    "unknown": (save({"model.no.weight": FIRST[NORM]}), "1 unexpected: model.no.weight"),
    "shape": (save({NORM: FIRST[NORM][:5]}), f"of the wrong shape: {NORM} [5]"),
    "integers": (save({NORM: FIRST[NORM].astype(np.int32)}), f"{NORM} I32 (in body)"),
    "truncated": (save(SECOND)[:-4], "body: is truncated (4 bytes short)"),
    "header": (save(SECOND)[:100], "body: is not a safetensors file, or truncated"),
    "empty": (b"", "body: is empty"),
    "pickle": (b"\x80\x04" + b"a" * 90, "body: is a PyTorch pickle"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_tensor_ends_the_update(updated: Server, name: str) -> None:
    data, text = WRONG[name]
    good(updated, START)
    assert send(updated, halves(SECOND)[0]).status == 200
    answer = send(updated, data)
    assert (answer.status, answer.error["code"]) == (400, "invalid_weights")
    assert text in answer.error["message"] and tempfile.gettempdir() not in answer.error["message"]
    assert updated.request(FINISH, method="POST").status == 409
    good(updated, START)  # the staged half was discarded, so that this update changes nothing
    good(updated, f"{FINISH}?version=0")


def test_too_many_bytes(updated: Server) -> None:
    most = 2 * sum(array.nbytes for array in FIRST.values())
    good(updated, START)
    announced = {**BYTES, "content-length": str(most + (1 << 20))}
    assert updated.request(UPDATE, b"a", announced).status == 413
    assert updated.request(FINISH, method="POST").status == 409
    good(updated, START)
    for _ in range(2):  # twice the bytes of the model, and two headers
        assert send(updated, SECOND).status == 200
    answer = send(updated, {NORM: np.zeros((200, 128), np.float32)})
    assert answer.status == 413 and answer.error["code"] == "too_large"
    assert updated.request(FINISH, method="POST").status == 409


def test_calls_out_of_order(updated: Server) -> None:
    for path, body in ((UPDATE, save(FIRST)), (FINISH, None)):
        answer = updated.request(path, body, BYTES if body else None, "POST")
        assert answer.status == 409 and START in answer.error["message"]
    good(updated, START)
    assert send(updated, halves(SECOND)[0]).status == 200
    answer = updated.request(START, method="POST")
    assert answer.status == 409
    assert FINISH in answer.error["message"] and "restart=true" in answer.error["message"]
    answer = updated.request(f"{FINISH}?running=later", method="POST")
    assert answer.status == 400 and answer.error["param"] == "running"
    good(updated, f"{START}?restart=true")
    good(updated, f"{FINISH}?version=0")
    good(updated, START)
    answer = updated.request(f"{FINISH}?version=%00", method="POST")
    assert answer.status == 400 and answer.error["param"] == "version"


def test_a_client_that_goes_away(updated: Server) -> None:
    good(updated, START)
    data = save(SECOND)
    with updated.connect() as one:
        head = (
            f"POST {UPDATE} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {updated.key}\r\n"
            f"content-type: application/octet-stream\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        one.sendall(head.encode() + data[: len(data) // 2])
        while (answer := send(updated, FIRST)).status == 200:
            good(updated, f"{START}?restart=true")
        assert answer.status == 409 and "wait for its answer" in answer.error["message"]
    while (answer := updated.request(START, method="POST")).status == 409:
        time.sleep(0.02)
    assert answer.status == 200
    names = [path.name for path in Path(f"/proc/{updated.process.pid}/fd").iterdir()]
    links = [Path(f"/proc/{updated.process.pid}/fd/{name}") for name in names]
    files = [str(link.readlink()) for link in links if link.is_symlink()]
    assert not [file for file in files if "jaxserve-" in file]
    good(updated, f"{FINISH}?version=0")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("/etc", "'/etc' is outside"),
        ("../outside", "is outside"),
        ("link", "'link' is outside"),
        ("inner", "'model.safetensors' in 'inner' is outside"),
        ("none", "there is no folder 'none'"),
        ("first/config.json", "there is no folder"),
        ("a\0b", "there is no folder"),
        (".", ".: has neither"),
        ("linked", "linked/model.safetensors: links to second/model.safetensors, outside"),
        ("a/model", "a/model/model.safetensors: is truncated (2 bytes short); its header"),
    ],
)
def test_paths(updated: Server, root: Path, name: str, text: str) -> None:
    good(updated, START)
    answer = updated.request(UPDATE, {"model_path": name})
    assert answer.status == 400 and text in answer.error["message"], answer.body
    assert str(root) not in answer.error["message"]
    assert updated.request(FINISH, method="POST").status == 409


def test_other_transfers(updated: Server) -> None:
    path = "/init_weight_transfer_engine"
    answer = updated.request(path, {"init_info": {"master_address": "a", "world_size": 2}})
    assert answer.status == 400 and "NCCL" in answer.error["message"]
    assert START in answer.error["message"]
    good(updated, path, {"init_info": {}})
    for body in ({"update_info": {"names": ["a"]}}, {}, [], b""):
        good(updated, f"{START}?restart=true")
        answer = updated.request(UPDATE, body)
        assert answer.status == 400, answer.body
    assert updated.request(UPDATE, b"a", {"content-type": "text/plain"}).status == 415
    good(updated, f"{FINISH}?version=0")
    assert good(updated, "/get_world_size") == {"world_size": 1}


def open_drawing(server: Server) -> socket.socket:
    return server.open_drawing(
        {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "stream": True, "temperature": 0}
    )


def states(server: Server) -> tuple[bool, bool]:
    return good(server, "/is_paused")["is_paused"], good(server, "/is_sleeping")["is_sleeping"]


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pause(updated: Server, mode: str) -> None:
    whole = updated.complete(PROMPT, 60, ignore_eos=True).json()["choices"][0]["text"]
    with open_drawing(updated) as one:
        query = "" if mode == "abort" else f"?mode={mode}"
        assert good(updated, f"/pause{query}") == {"status": "paused"}
        assert states(updated) == (True, False)
        count = updated.metric("generation_tokens_total")
        with updated.open_stream({"prompt": PROMPT, "max_tokens": 2}) as other:
            updated.wait_for("num_requests_waiting", lambda waiting: waiting == 1)
            assert updated.metric("generation_tokens_total") == count
            assert good(updated, "/resume") == {"status": "resumed"}
            assert other.recv(1 << 16).startswith(b"HTTP/1.1 200")
        events = read_stream(one)
    assert states(updated) == (False, False)
    if mode == "abort":
        assert b'"code":"aborted"' in events
    else:
        texts = [json.loads(line[6:]) for line in events.split(b"\n") if line[:7] == b"data: {"]
        drawn = "".join(event["choices"][0]["text"] for event in texts)
        assert whole.endswith(drawn) and b'"finish_reason":"length"' in events
    answer = updated.request("/pause?mode=later", method="POST")
    assert answer.status == 400 and answer.error["param"] == "mode"


@pytest.mark.parametrize(("level", "mode"), [(1, "keep"), (2, "wait"), (2, "abort")])
def test_sleep(updated: Server, level: int, mode: str) -> None:
    before = tokens(updated)
    good(updated, START)
    with open_drawing(updated) as one:
        good(updated, f"/sleep?level={level}&mode={mode}")
        assert states(updated) == (True, True)
        for path, body in (("/v1/completions", {"prompt": PROMPT}), (START, None), (FINISH, None)):
            answer = updated.request(path, body, method="POST")
            expected = (409, "conflict") if path == FINISH else (503, "engine_asleep")
            assert (answer.status, answer.error["code"]) == expected
        for path in ("/resume", "/wake_up?tags=weights"):
            assert updated.request(path, method="POST").status in (400, 503)
        good(updated, "/pause?mode=wait")
        assert updated.request("/health").status == 200 and states(updated) == (True, True)
        good(updated, "/wake_up?tags=weights&tags=kv_cache")
        events = read_stream(one)
    assert (b"[DONE]" in events and b'"code":"aborted"' in events) == (mode == "abort")
    assert (b'"finish_reason":"length"' in events) == (mode != "abort")
    assert states(updated) == (False, False) and tokens(updated) == before
    assert updated.request("/sleep?level=3", method="POST").error["param"] == "level"


def test_weights_of_files_have_their_version_again(updated: Server) -> None:
    before = tokens(updated)
    good(updated, START)
    good(updated, UPDATE, {"model_path": "second"})
    good(updated, f"{FINISH}?version=new")
    assert version(updated) == "new" and tokens(updated) != before
    good(updated, "/sleep?level=2")
    good(updated, "/wake_up")
    assert version(updated) == "0" and tokens(updated) == before


def test_a_batch_outlasts_a_pause_and_a_sleep(updated: Server) -> None:
    lines = [test_kept_files.line(str(n), "stone", max_tokens=20) for n in range(12)]
    with to(updated) as client:
        batch = test_kept_files.begin(client, test_kept_files.send(client, lines))
        for path, end in (("/pause", "/resume"), ("/sleep", "/wake_up")):
            updated.wait_for("num_requests_running", lambda count: count > 0)
            good(updated, path)
            good(updated, end)
        batch = test_kept_files.ended(client, batch.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 12)


def test_answers_name_the_weights(updated: Server, server: Server) -> None:
    user: Any = [{"role": "user", "content": PROMPT}]
    with openai.OpenAI(base_url=f"{updated.url}/v1", api_key=KEYS[0], max_retries=0) as client:
        named: Any = {"model": "demo_model"}
        answers: list[Any] = [
            client.completions.create(**named, prompt=PROMPT, max_tokens=2),
            *client.completions.create(**named, prompt=PROMPT, max_tokens=2, stream=True),
            client.chat.completions.create(**named, messages=user, max_tokens=2),
            *client.chat.completions.create(**named, messages=user, max_tokens=2, stream=True),
            client.responses.create(**named, input=PROMPT),
        ]
        with client.responses.stream(**named, input=PROMPT) as stream:
            answers.append([*stream] and stream.get_final_response())
    assert [answer.weight_version for answer in answers] == ["0"] * len(answers)
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}
    assert updated.request("/inference/v1/generate", body).json()["weight_version"] == "0"
    body |= {"stream": True}
    *events, _ = updated.request("/inference/v1/generate", body).events()
    assert {event["weight_version"] for event in events} == {"0"}
    message = {"messages": user, "max_tokens": 2}
    assert updated.request("/v1/messages", message).json()["weight_version"] == "0"
    events = updated.request("/v1/messages", message | {"stream": True}).events()
    [last] = [event for event in events if event["type"] == "message_delta"]
    assert last["weight_version"] == "0"
    assert b"weight_version" not in server.request("/v1/messages", message | {"stream": True}).body
    assert "weight_version" not in server.complete(PROMPT, 2).json()


def test_an_answer_during_an_update_names_the_last_version(updated: Server) -> None:
    good(updated, START)
    assert send(updated, SECOND).status == 200
    with open_drawing(updated) as one:
        good(updated, f"{FINISH}?version=new")
        events = read_stream(one)
    lines = [json.loads(line[6:]) for line in events.split(b"\n") if line[:7] == b"data: {"]
    assert lines[-1]["weight_version"] == "new" and lines[-1]["choices"][0]["finish_reason"]


def test_keys(updated: Server, server: Server, narrow: Server) -> None:
    for path in (*POSTS, *GETS):
        method = "GET" if path in GETS else "POST"
        for headers in ({"authorization": "Bearer x"}, {"authorization": f"Basic {KEYS[0]}"}):
            for body in (None, b"a"):
                sent = {**headers, **(BYTES if body else {})}
                answer = updated.request(path, body, sent, method)
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        for other in (server, narrow):
            answer = other.request(path, {} if method == "POST" else None, method=method)
            assert (answer.status, answer.error["code"]) == (404, "not_supported")
            assert "--enable-weight-updates" in answer.error["message"]
    answer = narrow.request(UPDATE, b"a", BYTES)
    assert answer.status == 404 and "--enable-weight-updates" in answer.error["message"]


def test_settings(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="enable_weight_updates needs an api_key"):
        ServerConfig(enable_weight_updates=True)
    with pytest.raises(InvalidRequest, match="weights_root needs enable_weight_updates"):
        ServerConfig(api_key=["a"], weights_root=str(tmp_path))
    with pytest.raises(InvalidRequest, match="weights_root: no such folder"):
        ServerConfig(api_key=["a"], enable_weight_updates=True, weights_root=str(tmp_path / "a"))
    with pytest.raises(InvalidRequest, match="enable_weight_updates is not supported with"):
        check_server(ServerConfig(api_key=["a"], enable_weight_updates=True))


def test_weights_that_cannot_be_read_again(
    make_app: Callable[..., App], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(enable_weight_updates=True, api_key=("key",))
    engine = app.models.all[0].llm._thread.engine
    loaded, source = engine.loaded, engine.loaded.source
    assert source is not None

    async def scene() -> list[Any]:
        transport = httpx2.ASGITransport(app.asgi)
        address, key = "http://localhost", {"x-api-key": "key"}
        async with httpx2.AsyncClient(transport=transport, base_url=address, headers=key) as client:
            answers = [await client.post("/sleep?level=2")]
            engine.loaded = replace(loaded, source=replace(source, path=tmp_path / "gone"))
            answers.append(await client.post("/wake_up"))
            engine.loaded = loaded
            answers += [await client.get("/is_sleeping"), await client.post("/wake_up")]
            return [*answers, await client.post("/v1/completions", json={"prompt": PROMPT})]

    slept, refused, *others = asyncio.run(scene())
    assert refused.status_code == 500 and refused.json()["error"]["code"] == "unreadable_weights"
    assert str(tmp_path / "gone") in caplog.text and others[0].json() == {"is_sleeping": True}
    assert {answer.status_code for answer in (slept, *others)} == {200}


def test_several_models_are_named(make_app: Callable[..., App]) -> None:
    app = make_app(enable_weight_updates=True, api_key=("key",))
    [first] = app.models.all
    second = type(first)(["other"], "other", first.llm, app.config, b"secret")
    app.models.all.append(second)
    app.models = app.asgi.state.served.models = Models(app.models.all)

    async def scene() -> list[tuple[int, Any]]:
        transport = httpx2.ASGITransport(app.asgi)
        key = {"x-api-key": "key"}
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://localhost", headers=key
        ) as client:
            found = []
            for path in ("", "?model=none", "?model=other", "?model=demo"):
                answer = await client.post(f"{START}{path}")
                found.append((answer.status_code, answer.json()))
            body = {"model_path": "first"}
            answer = await client.post(f"{UPDATE}?model=other", json=body)
            return [*found, (answer.status_code, answer.json())]

    missing, unknown, other, demo, rootless = asyncio.run(scene())
    assert missing[0] == 400 and "the server has demo, other" in missing[1]["error"]["message"]
    assert unknown[0] == 404 and other[0] == demo[0] == 200
    assert rootless[0] == 400 and "--weights-root" in rootless[1]["error"]["message"]
