"""A replica of two hosts on Ray Serve: its answers, the death of one, and the end of all."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from jaxserve import LLM, SamplingParams
from scripts.lib.server_process import ask
from scripts.serving.replicas import Fleet, left_over
from tests.support.kept_programs import in_users_environment

pytestmark = pytest.mark.ray
BODY = {"prompt": "Reverse: s-t-o-n-e", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
SECONDS = 240.0


@pytest.fixture
def gang() -> Iterator[Fleet]:
    """Ray keeps its sockets in a folder whose path has to be short."""
    with tempfile.TemporaryDirectory(prefix="r") as home, in_users_environment():
        words = ("--nnodes", "2", "--tensor-parallel-size", "2")
        environment = {"HOME": home, "TMPDIR": home}
        with Fleet(*words, num_replicas=1, environment=environment) as fleet:
            yield fleet


def tokens_of(fleet: Fleet) -> list[int]:
    answer = ask(f"{fleet.url}/v1/completions", BODY | {"return_token_ids": True})
    return answer["choices"][0]["token_ids"]


def new_gang(fleet: Fleet, before: set[int]) -> set[int]:
    """Wait until other processes serve, and return them."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        now = {*fleet.replicas(), *fleet.followers()}
        with suppress(OSError):
            if len(now) == 2 and not now & before and tokens_of(fleet):
                return now
        time.sleep(0.2)
    raise AssertionError(f"no other hosts than {before} serve: {fleet.log()}")


def test_a_gang_answers_as_one_process_and_is_replaced_whole(gang: Fleet) -> None:
    fields: Any = {name: BODY[name] for name in ("max_tokens", "temperature", "ignore_eos")}
    with LLM(max_num_seqs=4, max_model_len=256) as llm:
        output = llm.generate([BODY["prompt"]], SamplingParams(**fields))
        right = output[0].outputs[0].token_ids
    assert tokens_of(gang) == right
    hosts = {*gang.replicas(), *gang.followers()}
    assert len(hosts) == 2
    os.kill(gang.followers()[0], signal.SIGKILL)
    hosts |= new_gang(gang, hosts)
    assert tokens_of(gang) == right
    before = gang.processes()
    assert gang.stop() == 0
    assert left_over(before) == {}
    assert not [number for number in hosts if os.path.exists(f"/proc/{number}")]
