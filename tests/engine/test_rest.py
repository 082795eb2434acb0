"""Engines without work: after a while they give memory back, once."""

from __future__ import annotations

import threading
import time

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.engine import thread
from jaxserve.start.garbage import return_memory
from jaxserve.start.loaded import Loaded


def test_an_idle_engine_gives_memory_back_once(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: list[float] = []
    arrived = threading.Event()

    def noted() -> None:
        return_memory()
        returned.append(time.monotonic())
        arrived.set()

    monkeypatch.setattr(thread, "return_memory", noted)
    monkeypatch.setattr(thread, "_REST_SECONDS", 0.3)
    monkeypatch.setattr(loaded.runner, "close", lambda: None)
    with LLM(loaded) as llm:
        assert arrived.wait(30), "an engine that never worked keeps its start's memory"
        sampling = SamplingParams(max_tokens=8, temperature=0)
        first = llm.generate("ab", sampling, use_tqdm=False)
        busy_until = time.monotonic()
        arrived.clear()
        # Questions that are no work do not put it off.
        while not arrived.wait(0.05):
            llm.stats()
            assert time.monotonic() - busy_until < 30
        assert returned[-1] - busy_until > 0.2
        count = len(returned)
        llm.stats()
        assert not threading.Event().wait(0.7)
        llm.stats()
        assert len(returned) == count
        again = llm.generate("ab", sampling, use_tqdm=False)
        assert again[0].outputs[0].token_ids == first[0].outputs[0].token_ids
