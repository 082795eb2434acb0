"""vLLM's router and SGLang's gateway over two replicas, driven by the openai client."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import openai
import pytest

from scripts.lib.server_process import Server, read_metric
from scripts.serving.front_checks import (
    CHECKS,
    check_answer,
    check_drain,
    client,
    wait_until_idle,
)
from scripts.serving.front_kills import replace
from scripts.serving.front_process import KINDS, MODEL, REPLICA, Front
from tests.clients.conftest import ensure_clients
from tests.support.kept_programs import in_users_environment

# Requests that a router refuses by itself, independent of the servers behind it.
REFUSES = {("smg", "prompts of token ids"): "StringOrArray"}
WHOLE = [name for name, check in CHECKS.items() if check is not check_drain]


@pytest.fixture(scope="module")
def fronts() -> Iterator[dict[str, Front]]:
    ensure_clients()
    replicas = [Server(*REPLICA) for _ in range(2)]
    with in_users_environment(), ThreadPoolExecutor() as threads, ExitStack() as stack:
        stack.callback(lambda: [replica.__exit__(None, None, None) for replica in replicas])
        list(threads.map(Server.__enter__, replicas))
        found = {kind: Front(kind, replicas) for kind in KINDS}
        for front in found.values():
            stack.push(front)
        list(threads.map(Front.__enter__, found.values()))
        yield found


@pytest.mark.parametrize("check", WHOLE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_router_gives_what_a_replica_does(
    fronts: dict[str, Front], kind: str, check: str
) -> None:
    run = partial(CHECKS[check], fronts[kind])
    if (kind, check) in REFUSES:
        with pytest.raises(openai.BadRequestError, match=REFUSES[kind, check]):
            run()
    else:
        run()


def test_a_replica_drains_comes_back_and_is_killed(fronts: dict[str, Front]) -> None:
    first, second = fronts.values()
    check_drain(first)
    [gone] = [each for each in first.replicas if each.process.poll() is not None]
    assert gone.process.returncode == 0
    replace(first, gone)

    wait_until_idle(second)
    with client(second, retries=2) as api:
        body = {"ignore_eos": True}
        stream = api.completions.create(
            model=MODEL, prompt="x", max_tokens=900, stream=True, extra_body=body
        )
        chunks = iter(stream)
        next(chunks)
        running = [read_metric(each.url, "num_requests_running") for each in second.replicas]
        second.replicas[running.index(1)].process.kill()
        for _ in range(8):
            check_answer(api)
        # The reader of a stream that was cut off gets an error.
        with pytest.raises(Exception, match=r"closed|chunk|incomplete|body|error"):
            list(chunks)
