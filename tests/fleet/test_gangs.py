"""A replica of two hosts on Ray Serve: its answers, the death of one, and the end of all."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from jaxserve.models import read_model_config
from jaxserve.request import SamplingParams
from jaxserve.settings.config import bundled_model
from jaxserve.weights import load_weights
from scripts.lib.server_process import ask
from scripts.serving.replicas import Fleet, descendants, left_over
from tests.support.kept_programs import in_users_environment
from tests.support.oracle import Oracle

pytestmark = pytest.mark.ray
PROMPT = [86, 105, 122, 105, 118, 119, 105, 62, 36, 119, 49, 120, 49, 115, 49, 114, 49, 105]
FIELDS: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
SECONDS = 240.0


@pytest.fixture
def gang() -> Iterator[Fleet]:
    """Start a gang. Ray keeps its sockets in a folder whose path has to be short."""
    with tempfile.TemporaryDirectory(prefix="r") as home, in_users_environment():
        words = ("--nnodes", "2", "--tensor-parallel-size", "2")
        environment = {"HOME": home, "TMPDIR": home}
        with Fleet(*words, num_replicas=1, environment=environment) as fleet:
            yield fleet


def tokens_of(fleet: Fleet) -> list[int]:
    body = {"prompt": PROMPT, "return_token_ids": True, **FIELDS}
    return ask(f"{fleet.url}/v1/completions", body)["choices"][0]["token_ids"]


def oracles_tokens() -> list[int]:
    config = read_model_config(bundled_model())
    oracle = Oracle(config, load_weights(bundled_model(), config, np.dtype("float32")))
    return list(oracle.answer(PROMPT, SamplingParams(**FIELDS), 0, ()).token_ids)


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


def test_a_gang_draws_what_the_oracle_does_and_is_replaced_whole(gang: Fleet) -> None:
    right = oracles_tokens()
    assert tokens_of(gang) == right
    hosts = {*gang.replicas(), *gang.followers()}
    assert len(hosts) == 2
    os.kill(gang.followers()[0], signal.SIGKILL)
    hosts |= new_gang(gang, hosts)
    assert tokens_of(gang) == right
    before = gang.processes()
    assert gang.stop() == 0
    assert left_over(before) == {}
    assert not [number for number in hosts if number in descendants(number)]
