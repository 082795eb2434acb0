"""A replica's health, load and reports, in this process: no Ray is needed for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from jaxserve.errors import EngineDead
from jaxserve.fleet.prefixes import digests_of, reported
from jaxserve.fleet.replica import ReplicaServer
from jaxserve.server.served.specs import ModelSpec
from jaxserve.server.settings import ServerConfig
from jaxserve.settings.config import EngineConfig
from tests.support.quick_code import quick_programs

SECRET = bytes(range(32))
ENGINE: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "decode_sizes": (2,),
    "token_sizes": (64,),
    "max_model_len": 1024,
    "wait_for_all_programs": True,
}


@pytest.fixture(scope="module")
def replica() -> Iterator[ReplicaServer]:
    spec = ModelSpec(["demo_model"], "demo_model", EngineConfig(**ENGINE))
    with quick_programs():
        made = ReplicaServer([spec], ServerConfig(health_timeout=0.2), SECRET, 0, True)
    yield made
    made.close()


async def complete(replica: ReplicaServer, body: dict[str, Any]) -> int:
    transport = httpx2.ASGITransport(app=replica.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return (await client.post("/v1/completions", json=body)).status_code


def test_its_report_has_what_it_has_served(replica: ReplicaServer) -> None:
    before = replica.routing_stats()
    assert before == {"load": 0, "prefixes": b""}
    body = {"prompt": list(range(10, 60)) * 14, "max_tokens": 2, "model": "demo_model"}
    assert asyncio.run(complete(replica, body | {"max_tokens": -2})) == 400
    assert replica.routing_stats() == before
    assert asyncio.run(complete(replica, body)) == 200
    after = replica.routing_stats()
    transport = httpx2.Request("POST", "http://localhost", json=body).content
    assert after["load"] == 0
    assert len(digests := digests_of(transport, SECRET)) == 2
    assert reported(after["prefixes"]) == set(digests)


def test_it_is_ill_while_its_engine_stands_still_and_when_it_has_ended(
    replica: ReplicaServer,
) -> None:
    replica.check()
    llm = replica._models.all[0].llm
    hangs, stays = threading.Event(), threading.Event()

    def hang(engine: Any) -> None:
        hangs.set()
        assert stays.wait(30)

    async def work() -> None:
        answer = asyncio.create_task(
            complete(replica, {"prompt": "a", "max_tokens": 900, "ignore_eos": True})
        )
        while not replica.routing_stats()["load"]:
            await asyncio.sleep(0.001)
        hung = asyncio.create_task(asyncio.to_thread(llm.inspect, hang))
        await asyncio.to_thread(hangs.wait)
        await asyncio.sleep(0.4)
        with pytest.raises(EngineDead, match="has not moved for"):
            replica.check()
        stays.set()
        await hung
        assert await answer == 200

    asyncio.run(work())
    replica.check()
    replica.close()
    with pytest.raises(EngineDead, match="has ended"):
        replica.check()


def test_the_secret_lies_in_no_file_once_the_models_are_loaded(replica: ReplicaServer) -> None:
    path = replica._models.all[0].llm.config.prefix_caching_secret
    assert isinstance(path, Path) and not path.exists()
