"""/dashboard/events, read without a browser, and the installation of a browser."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.server.page.dashboard import (
    BLANK,
    CACHED,
    FIRST_SLOT,
    MAX_CELLS,
    MAX_WATCHERS,
    SHARED,
    page_map,
)
from tests.page.browser import find, install
from tests.page.conftest import SMALL
from tests.support.live_server import Server

PATH = "/dashboard/events"


@contextmanager
def feed(server: Server, path: str = PATH) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("GET", path)
        yield connection.getresponse()
    finally:
        connection.close()


def snapshots(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def cells(pages: dict[str, Any]) -> list[int]:
    runs = pages["runs"]
    return [code for code, count in zip(runs[::2], runs[1::2], strict=True) for _ in range(count)]


def check(one: dict[str, Any]) -> None:
    """Check the invariants of a snapshot, in any state of the engine."""
    pages, stats = one["pages"], one["stats"]
    codes = np.array(cells(pages))
    assert pages["per_cell"] == 1 and len(codes) == pages["total"] == stats["num_pages"]
    assert np.count_nonzero(codes >= SHARED) == pages["held"] == stats["pages_in_use"]
    assert np.count_nonzero(codes == SHARED) == pages["shared"]
    assert np.count_nonzero(codes == CACHED) == pages["cached"]
    slots = [row[0] for row in one["running"]]
    assert slots == sorted(set(slots)) and len(slots) == stats["num_running"]
    assert {code - FIRST_SLOT for code in codes[codes >= FIRST_SLOT].tolist()} <= set(slots)
    assert all(row[0] == -1 for row in one["waiting"])
    for _, name, index, prompt, cached, computed, drawn, limit in one["running"]:
        assert re.fullmatch(r"request-\d+", name) and index == 0
        assert 0 <= cached <= prompt and 0 <= drawn <= limit
        assert computed <= prompt + drawn + 2 * 16  # of launches not read yet, steps are counted


def test_snapshots_agree_with_the_engine_through_a_load(
    server: Server, load: Callable[..., None]
) -> None:
    seen_waiting = seen_shared = False
    with feed(server, PATH + "?model=demo_model") as response:
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = snapshots(response)
        before = next(stream)
        load(24, 150)
        for one in stream:
            check(one)
            seen_waiting |= bool(one["waiting"])
            seen_shared |= one["pages"]["shared"] > 0
            drawn = one["stats"]["generation_tokens"] - before["stats"]["generation_tokens"]
            if drawn == 24 * 150 and one["stats"]["num_running"] == 0:
                break
        assert one["at"] > before["at"]
        assert b"Anna" not in json.dumps(one).encode()
        for name in ("first_token", "inter_token"):
            assert one[name][0] > before[name][0] and one[name][1] > before[name][1]
    assert seen_waiting and seen_shared


def test_page_map_codes_and_runs() -> None:
    ref_count = np.array([0, 1, 1, 3, 0, 0, 1])
    cached = np.array([0, 0, 1, 1, 1, 1, 0], bool)
    owner = np.array([-1, 4, 4, 0, -1, -1, 9])
    pages = page_map(ref_count, cached, owner)
    assert pages.runs == [
        *(BLANK, 1, FIRST_SLOT + 4, 2, SHARED, 1),
        *(CACHED, 2, FIRST_SLOT + 9, 1),
    ]
    assert (pages.total, pages.held, pages.shared, pages.cached) == (7, 4, 1, 2)
    assert pages.per_cell == 1


def test_a_large_page_map_is_thinned_out_and_its_counts_are_not() -> None:
    count = 3 * MAX_CELLS - 1
    ref_count = np.arange(count) % 3
    owner = np.where(ref_count > 0, 7, -1)
    pages = page_map(ref_count, np.zeros(count, bool), owner)
    assert pages.per_cell == 3
    assert pages.runs == [BLANK, MAX_CELLS]  # the first of each three
    assert (pages.held, pages.shared) == (2 * MAX_CELLS - 1, MAX_CELLS - 1)


def test_events_are_refused_with_the_reason(server: Server, guarded: Server) -> None:
    absent = server.request(PATH + "?model=none")
    assert absent.status == 404 and absent.error["code"] == "model_not_found"
    keyless = Server([])
    keyless.port = guarded.port
    assert keyless.request(PATH).status == 401
    for path in ("/", "/page/main.js"):
        assert keyless.request(path).status == 200
    with ExitStack() as stack:
        for _ in range(MAX_WATCHERS):
            next(snapshots(stack.enter_context(feed(server))))
        refused = server.request(PATH)
        assert refused.status == 429 and refused.headers["retry-after"] == "10"
    for _ in range(100):  # the server notices their end in its own time
        with feed(server) as response:
            if response.status == 200:
                return
        time.sleep(0.1)
    pytest.fail("the places of watchers that have gone are not given back")


def test_a_dashboard_does_not_hold_up_the_end() -> None:
    with Server([*SMALL, "--drain-timeout", "600"]) as server, feed(server) as response:
        next(snapshots(response))
        server.process.send_signal(signal.SIGTERM)
        for _ in snapshots(response):
            pass
        assert server.process.wait(timeout=60) == 0
    assert "Cancel" not in "".join(server.log)  # the framework's message about unfinished tasks


def test_a_browser_that_cannot_be_had_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.page.browser.NAMES", ("no-such-browser",))
    ways = [[["sh", "-c", "echo no way in; exit 3"]], [["sh", "-c", "echo nor here; exit 4"]]]
    with pytest.raises(pytest.fail.Exception) as failed:
        install("/no/such", ways)
    text = str(failed.value)
    assert "no way in" in text and "nor here" in text and "apt-get install chromium" in text


def test_ways_to_a_browser_are_tried_until_one_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = tmp_path / "browser-of-this-test"
    monkeypatch.setattr("tests.page.browser.NAMES", (browser.name,))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ways = [
        [["sh", "-c", "exit 1"]],
        [["sh", "-c", f"echo > {browser}; chmod +x {browser}"]],
        [["sh", "-c", f"rm {browser}"]],
    ]
    assert install("/no/such", ways) == str(browser) == find("/no/such")
