"""Servers that the tests share. Of package scope: other folders of the process come after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jaxserve.config import bundled_model
from tests.support.live_server import SMALL, Canary, Server

KEYS = ("first-key", "second-key")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The bundled model's, as Transformers reads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bundled_model())


@pytest.fixture(scope="session")
def oracle() -> Callable[[list[int]], np.ndarray]:
    """The distribution behind each token by Transformers, [T, V]."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bundled_model(), dtype=torch.float64)

    def logprobs(token_ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([token_ids])).logits[0].log_softmax(-1).numpy()

    return logprobs


@pytest.fixture(scope="package")
def main_server() -> Iterator[Server]:
    """The bundled model, with short times for slow clients."""
    times = "--header-timeout 3 --body-timeout 3 --write-timeout 4"
    buffers = "--max-unread-tokens 64 --send-buffer-bytes 4096"
    slow = [*times.split(), *buffers.split(), "--enable-tokenizer-info-endpoint"]
    with Server([*SMALL, *slow]) as server:
        yield server


@pytest.fixture(scope="package")
def main_canary(main_server: Server) -> Canary:
    return Canary(main_server)


@pytest.fixture
def server(main_server: Server, main_canary: Canary) -> Iterator[Server]:
    """The main server, which must be as it was after each test."""
    yield main_server
    main_canary.check()


@pytest.fixture(scope="package")
def slow_server() -> Iterator[Server]:
    """As the main server, where what runs can be seen to."""
    with Server(SMALL, module="tests.support.slow_server") as server:
        yield server


@pytest.fixture(scope="package")
def slow_canary(slow_server: Server) -> Canary:
    return Canary(slow_server)


@pytest.fixture
def slow(slow_server: Server, slow_canary: Canary) -> Iterator[Server]:
    """The slow server, which must be as it was after each test."""
    yield slow_server
    slow_canary.check()


@pytest.fixture(scope="package")
def narrow_server() -> Iterator[Server]:
    """One slot with slow steps, a short queue, keys, and no unknown fields."""
    narrow = (
        "--max-num-queued-reqs 2 --max-queued-prompt-tokens 64 "
        "--max-connections 24 --strict --max-num-seqs 1 --decode-sizes 1 "
        "--allowed-origins http://app.example --reasoning-parser qwen3 --tool-call-parser hermes"
    )
    keys = [part for key in KEYS for part in ("--api-key", key)]
    arguments = [*SMALL, *narrow.split(), *keys]
    with Server(arguments, key=KEYS[0], module="tests.support.slow_server") as server:
        yield server


@pytest.fixture(scope="package")
def narrow_canary(narrow_server: Server) -> Canary:
    return Canary(narrow_server)


@pytest.fixture
def narrow(narrow_server: Server, narrow_canary: Canary) -> Iterator[Server]:
    """The narrow server, which must be as it was after each test."""
    yield narrow_server
    narrow_canary.check()
