"""axe's rules in every state of the page, light and dark, wide and narrow; and its layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.page.conftest import Endless, OpenPage
from tests.page.recorded import chunk, recorded, send
from tests.page.test_chats import part, thought
from tests.page.test_markdown import TEXT
from tests.support.live_server import Server

WIDE: dict[str, Any] = {"viewport": {"width": 1280, "height": 800}}
NARROW: dict[str, Any] = {
    "viewport": {"width": 360, "height": 740},
    "has_touch": True,
    "is_mobile": True,
}
SCREENS = [("light", WIDE), ("dark", NARROW)]  # contrast is the theme's, the layout the width's
PROBABILITIES = {
    "content": [
        {"token": "green", "logprob": -0.1, "top_logprobs": [{"token": "blue", "logprob": -3.0}]}
    ]
}
# An answer with all of its optional parts, and a table and code that are wider than a phone.
WIDE_PARTS = "| " + "| a long name " * 8 + "|\n" + "|---" * 9 + "|\n| x |\n\n```\n" + "x" * 300
ALL = [
    thought("First, the sum."),
    chunk(TEXT + "\n" + WIDE_PARTS),
    part(0, '{"city": "Rome"}', "weather"),
    chunk("", "tool_calls"),
]


TREE = """
- article:
  - heading "You" [level=3]
  - text: How is Rome?
  - button "Copy"
  - button "Edit"
- article:
  - heading "recorded 0 tokens" [level=3]
  - group: /Thought for/
  - heading "Reverse a list" [level=4]
  - paragraph:
    - text: Take
    - code: xs[::-1]
    - text: ","
    - strong: or
    - emphasis: this
    - text: "& that:"
  - text: python
  - button "Copy code"
  - group "Code, python":
    - code: "def reverse(xs): return xs[::-1] # <b>"
  - list:
    - listitem:
      - paragraph: first
    - listitem:
      - paragraph: second
      - list:
        - listitem: nested
        - listitem: ☑ done
  - blockquote:
    - paragraph: quoted lines
  - group "Table":
    - table:
      - rowgroup:
        - row "name value":
          - columnheader "name"
          - columnheader "value"
  - heading "Deeper" [level=5]
  - paragraph:
    - link "the page"
  - separator
  - paragraph:
    - 'link "image: a picture"'
  - group: Call of weather
  - textbox "Result of weather"
  - button "Send results"
  - button "Regenerate"
"""


def check(page: Page, state: str) -> None:
    """Check that axe has no finding, and that every element lies within the page."""
    violations = Axe().run(page).response["violations"]
    assert [
        (state, violation["id"], [node["html"][:200] for node in violation["nodes"]])
        for violation in violations
    ] == []
    width = page.viewport_size["width"] if page.viewport_size else 0
    assert page.evaluate("document.documentElement.scrollWidth") == width, state


def test_a_screen_reader_gets_the_structure_of_an_answer(open_page: OpenPage) -> None:
    page = open_page(expected=("ERR_FAILED",))
    recorded(page, ALL, {})
    send(page, "How is Rome?")
    expect(page.locator("#status")).to_contain_text("Answer complete")
    expect(page.locator("#messages")).to_match_aria_snapshot(TREE)


@pytest.mark.parametrize(("scheme", "screen"), SCREENS)
def test_axe_finds_nothing(open_page: OpenPage, scheme: str, screen: dict[str, Any]) -> None:
    page = open_page(expected=("ERR_FAILED",), color_scheme=scheme, **screen)
    failed = [{"error": {"message": "the engine has ended", "code": "engine_dead"}}]
    marked = [chunk("green", "stop", logprobs=PROBABILITIES)]
    recorded(page, ALL, {"logprobs": True}, marked, failed)
    send(page, "How is Rome?")
    expect(page.locator("#status")).to_contain_text("Answer complete")
    for summary in page.locator("article summary:visible").all():
        summary.click()
    check(page, "answered")
    page.locator("article").first.get_by_role("button", name="Edit").click()
    page.get_by_role("button", name="Chats").click()
    check(page, "chats")
    page.keyboard.press("Escape")
    page.locator("#settings summary").click()
    page.get_by_label("Mark tokens").check()
    page.get_by_label("seed").fill("x")
    send(page, "Which?")
    expect(page.locator("#problem")).to_contain_text("seed")
    check(page, "settings, a fault, an editor")
    page.get_by_label("seed").fill("")
    page.locator("#settings summary").click()
    send(page, "Which?")
    expect(page.locator(".token")).to_have_count(1)
    page.locator(".token").hover()
    expect(page.get_by_role("tooltip")).to_be_visible()
    check(page, "marks")
    send(page, "And now?")
    expect(page.locator("#problem")).to_have_text("the engine has ended")
    check(page, "error")


@pytest.mark.parametrize(("scheme", "screen"), SCREENS)
def test_axe_finds_nothing_while_the_engine_works(
    open_page: OpenPage, load: Callable[..., None], scheme: str, screen: dict[str, Any]
) -> None:
    page = open_page(color_scheme=scheme, **screen)
    expect(page.get_by_text("Nothing said yet.")).to_be_visible()
    check(page, "empty")
    Endless(page)
    load(10, 150)
    send(page, "Reverse: s-t-o-n-e")
    expect(page.locator("article.assistant .text")).to_contain_text("e")
    check(page, "streaming")
    if screen is NARROW:
        page.get_by_role("button", name="Engine").click()
    expect(page.locator("#rows tr.runs").first).to_be_visible()
    check(page, "dashboard")


def test_axe_finds_nothing_where_a_key_is_needed(open_page: OpenPage, guarded: Server) -> None:
    page = open_page(guarded.url + "/llm", expected=("401 (Unauthorized)",), color_scheme="dark")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.get_by_role("textbox", name="API key").fill("not a key")
    page.keyboard.press("Enter")
    expect(page.locator("#refused")).not_to_be_empty()
    check(page, "key")


def test_axe_finds_what_is_wrong(open_page: OpenPage) -> None:
    page = open_page()
    page.evaluate("() => document.getElementById('theme').replaceChildren()")
    found = {violation["id"] for violation in Axe().run(page).response["violations"]}
    assert found == {"button-name"}
