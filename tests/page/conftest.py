"""A server, a browser and pages of it. Of package scope: Playwright's loop must end with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.page.browser import open_browser
from tests.support.live_server import Server

SMALL = (
    "--max-num-seqs 8 --max-num-batched-tokens 128 --decode-sizes 8 --token-sizes 128 "
    "--check-invariants --port 0"
).split()
KEY = "a-key-for-the-page"

OpenPage = Callable[..., Page]
expect.set_options(timeout=30_000)


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    """Start a server with slow steps, so that answers last until a test has looked at them."""
    with Server(SMALL, module="tests.support.slow_server") as server:
        yield server


@pytest.fixture(scope="package")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server with a key, below a path; its model has two names and no settings."""
    silent = tmp_path_factory.mktemp("silent")
    (silent / "generation_config.json").write_text('{"eos_token_id": 3}')
    names = ["--served-model-name", "first", "--served-model-name", "second"]
    more = ["--generation-config", str(silent), "--root-path", "/llm", "--api-key", KEY]
    with Server([*SMALL, *names, *more], key=KEY) as server:
        yield server


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def open_page(browser: Browser, server: Server) -> Iterator[OpenPage]:
    """Open the page; at the end, check that it had no errors and no resources from elsewhere."""
    contexts, faults = [], []

    def open_one(url: str = "", expected: tuple[str, ...] = (), **options: Any) -> Page:
        url = url or server.url
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}} | options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "console",
            lambda said: (
                faults.append(said.text)
                if said.type == "error" and not any(part in said.text for part in expected)
                else None
            ),
        )
        page.on(
            "request",
            lambda asked: None if asked.url.startswith(url) else faults.append(asked.url),
        )
        page.goto(url)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture
def load(server: Server) -> Iterator[Callable[..., None]]:
    """Post requests that hold the engine busy, and wait at the end until all have been answered."""
    pool, pending = ThreadPoolExecutor(64), []

    def post(count: int, max_tokens: int) -> None:
        prompt = "The code of Anna is 4417. The code of Tom is 9120. " * 4
        for number in range(count):
            pending.append(
                pool.submit(
                    server.complete, f"{prompt}{number}", max_tokens, ignore_eos=True, seed=number
                )
            )

    yield post
    with pool:
        assert [one.result().status for one in pending] == [200] * len(pending)


class Endless:
    """Makes answers long by a field without a control on the page, and records the requests.

    They end after `most` tokens, or where the model's positions do.
    """

    def __init__(self, page: Page, most: int | None = None) -> None:
        self._fields = {"ignore_eos": True} | ({} if most is None else {"max_tokens": most})
        self.sent: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        page.route("**/v1/chat/completions", self._pass_on)

    def _pass_on(self, route: Route) -> None:
        body = json.loads(route.request.post_data or "")
        self.sent.append(body)
        self.headers.append(route.request.headers)
        route.continue_(post_data=json.dumps(body | self._fields))
