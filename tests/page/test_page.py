"""The playground in a real browser, against a real server."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

import jaxserve
from tests.page.conftest import KEY, Endless, OpenPage
from tests.page.recorded import chunk, recorded, send
from tests.support.live_server import Server

FILES = Path(jaxserve.__file__).parent / "server/page"
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "device_scale_factor": 2,
    "has_touch": True,
    "is_mobile": True,
}
LOW = {"width": 1000, "height": 330}  # so that one answer scrolls
QUESTION, ANSWER = "Reverse: s-t-o-n-e", "e-n-o-t-s"
LABEL = re.compile(r"^Page map: \d+ of \d+ pages held, [1-9]\d* shared, \d+ cached")


def grows(page: Page) -> None:
    """Wait until the last answer has more text than now, with its stream still open."""
    text = page.locator("article.assistant .text").last
    before = len(text.inner_text())
    page.wait_for_timeout(50)
    for _ in range(200):
        if len(text.inner_text()) > before:
            break
        page.wait_for_timeout(50)
    assert len(text.inner_text()) > before
    expect(page.get_by_role("button", name="Stop")).to_be_visible()


def test_a_question_is_answered_with_its_figures(open_page: OpenPage) -> None:
    page = open_page()
    page.get_by_role("button", name=QUESTION).click()
    page.keyboard.press("Enter")
    expect(page.locator("article.user .text")).to_have_text(QUESTION)
    expect(page.locator("article.assistant .text")).to_have_text(ANSWER)
    expect(page.locator("article.assistant h3")).to_contain_text("demo_model")
    expect(page.locator("article.assistant h3")).to_contain_text("10 tokens · ")
    expect(page.locator("#status")).to_have_text(f"Answer complete: {ANSWER}")
    expect(page.get_by_label("Message")).to_be_focused()
    # A second turn carries the first; a new chat starts empty.
    sent = Endless(page).sent
    page.locator("#settings summary").click()
    page.get_by_label("max_tokens").fill("2")
    send(page, QUESTION)
    expect(page.locator("article.assistant h3").last).to_contain_text("cut off · 2 tokens")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)
    send(page, QUESTION)
    expect(page.locator("article.assistant h3").last).to_contain_text("cut off")
    roles = [[message["role"] for message in body["messages"]] for body in sent]
    assert roles == [["user", "assistant", "user"], ["user"]]


def test_an_answer_streams_and_stops(open_page: OpenPage, server: Server) -> None:
    page = open_page()
    Endless(page)
    send(page, QUESTION)
    grows(page)
    grows(page)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("article.assistant h3")).to_contain_text("stopped · ")
    expect(page.locator("article[aria-busy]")).to_have_count(0)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator("#running")).to_have_text("0 of 8")
    expect(page.locator("#held")).to_have_text("0")
    text = page.locator("article.assistant .text").inner_text()
    page.wait_for_timeout(300)
    assert page.locator("article.assistant .text").inner_text() == text
    assert server.request("/health").status == 200


def test_the_dashboard_shows_the_engine_at_work(
    open_page: OpenPage, load: Callable[..., None]
) -> None:
    page = open_page()
    picture = "map => map.toDataURL()"
    expect(page.locator("#running")).to_have_text("0 of 8")
    expect(page.locator("#rows tr.runs")).to_have_count(0)
    idle = page.locator("#map").evaluate(picture)
    load(24, 300)
    expect(page.locator("#running")).to_have_text("8 of 8")
    expect(page.locator("#rows tr.runs")).to_have_count(8)
    expect(page.locator("#waiting")).not_to_have_text("0")
    expect(page.locator("#rows tr.waits").first).to_contain_text("/300")
    expect(page.locator("#shared")).not_to_have_text("0")
    expect(page.locator("#rate-now")).not_to_have_text("0")
    busy = page.locator("#map").evaluate(picture)
    plot = page.locator("#rate-plot").evaluate(picture)
    assert busy != idle
    expect(page.locator("#map")).to_have_attribute("aria-label", LABEL)
    send(page, QUESTION)  # among them, the page's own request
    expect(page.locator("article.assistant .text")).to_have_text(ANSWER)
    expect(page.locator("#running")).to_have_text("0 of 8")
    expect(page.locator("#held")).to_have_text("0")
    expect(page.locator("#cached")).not_to_have_text("0")
    expect(page.locator("#first-now")).not_to_have_text("–")
    expect(page.locator("#between-now")).not_to_have_text("–")
    assert page.locator("#map").evaluate(picture) not in (busy, idle)
    assert page.locator("#rate-plot").evaluate(picture) != plot


def test_nothing_moves_while_an_answer_streams(
    open_page: OpenPage, load: Callable[..., None]
) -> None:
    page = open_page(viewport=LOW)
    Endless(page, most=250)
    expect(page.locator("#running")).to_have_text("0 of 8")
    page.evaluate(
        """() => {
            window.shifts = [];
            const take = (list) => {
                for (const one of list.getEntries()) {
                    window.shifts.push([one.value, one.sources.map((it) => it.node?.outerHTML)]);
                }
            };
            new PerformanceObserver(take).observe({ type: "layout-shift" });
        }"""
    )
    load(12, 150)
    send(page, QUESTION)
    grows(page)
    page.get_by_role("button", name="Stop").wait_for(state="hidden")
    at_end = "at => at.scrollHeight - at.scrollTop - at.clientHeight < 2"
    assert page.locator("#scroller").evaluate("at => at.scrollHeight > at.clientHeight")
    assert page.locator("#scroller").evaluate(at_end)
    shifts = page.evaluate("window.shifts")
    assert [one for one in shifts if one[0] > 0] == []


def test_a_reader_who_scrolled_up_is_left_there(
    open_page: OpenPage, load: Callable[..., None]
) -> None:
    page = open_page(viewport=LOW)
    Endless(page, most=500)
    load(7, 500)
    send(page, QUESTION)
    scroller = page.locator("#scroller")
    while not scroller.evaluate("at => at.scrollTop > 90"):
        grows(page)
    scroller.evaluate("at => { at.scrollTop = 10; }")
    grows(page)
    page.get_by_role("button", name="Stop").wait_for(state="hidden")
    assert scroller.evaluate("at => at.scrollTop") == 10
    assert scroller.evaluate("at => at.scrollHeight - at.clientHeight > 90")


def test_sampling_controls_are_sent_and_faults_named(open_page: OpenPage) -> None:
    page = open_page(expected=("400 (Bad Request)",))
    sent = Endless(page).sent
    page.locator("#settings summary").click()
    values = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 11}
    for name, value in (values | {"max_tokens": 4}).items():
        page.get_by_label(name).fill(str(value))
    send(page, QUESTION)
    expect(page.locator("article.assistant h3")).to_contain_text("cut off · 4 tokens")
    assert sent[0].items() >= (values | {"max_tokens": 4, "model": "demo_model"}).items()
    assert sent[0].keys().isdisjoint(("logprobs", "top_logprobs", "tools"))
    expect(page.locator("#chosen")).to_contain_text("temperature 0.5 · top_p 0.9 · top_k 7")

    page.get_by_label("top_p").fill("1.5")  # the server's to refuse
    send(page, "And again")
    expect(page.locator("#problem")).to_contain_text("top_p")
    expect(page.get_by_label("top_p")).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_label("top_p")).to_be_focused()
    expect(page.get_by_label("Message")).to_have_value("And again")
    expect(page.locator("article")).to_have_count(2)
    page.get_by_label("top_p").fill("")
    page.get_by_label("seed").fill("1.5")  # the page's own
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#problem")).to_have_text("seed must be a whole number")
    assert len(sent) == 2
    page.get_by_label("seed").fill("")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("article")).to_have_count(4)
    expect(page.locator("#problem")).to_have_text("")


def focused(page: Page) -> str:
    return page.evaluate(
        "document.activeElement.id || document.activeElement.name"
        " || document.activeElement.className || document.activeElement.tagName"
    )


def test_everything_is_reached_by_keyboard(open_page: OpenPage) -> None:
    page = open_page()
    Endless(page)
    expect(page.get_by_label("Message")).to_be_focused()
    page.keyboard.type(QUESTION)
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Again")
    assert page.get_by_label("Message").input_value() == f"{QUESTION}\nAgain"
    page.keyboard.press("Enter")
    grows(page)
    page.keyboard.press("Escape")
    expect(page.locator("article.assistant h3")).to_contain_text("stopped")
    page.keyboard.press("Tab")
    assert focused(page) == "send"
    page.keyboard.press("Tab")
    assert focused(page) == "SUMMARY"
    page.keyboard.press("Enter")
    order = []
    for _ in range(11):
        page.keyboard.press("Tab")
        order.append(focused(page))
    fields = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"]
    assert order == ["system", *fields, "tools", "logprobs", "clear", "rows"]
    page.locator("#theme").focus()
    page.keyboard.press("Tab")
    assert focused(page) == "scroller"
    order = []
    for _ in range(6):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.dataset.act") or focused(page))
    assert order == ["copy", "edit", "copy", "edit", "regenerate", "text"]
    page.locator("#show-chats").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#chats")).to_be_visible()
    assert page.evaluate("document.activeElement.closest('dialog').id") == "chats"
    page.keyboard.press("Escape")
    expect(page.locator("#chats")).to_be_hidden()
    assert focused(page) == "show-chats"
    # Whatever has the focus shows it.
    for name in ("send", "theme", "text", "scroller"):
        page.locator(f"#{name}").focus()
        page.keyboard.press("Shift")
        style = page.locator(f"#{name}").evaluate("at => getComputedStyle(at).outlineStyle")
        assert style == "solid", name


def test_every_control_has_a_name(open_page: OpenPage) -> None:
    page = open_page()
    page.locator("#settings summary").click()
    tree = page.locator("body").aria_snapshot()
    for line in tree.splitlines():
        role = line.strip().removeprefix("- ").split(" ")[0].rstrip(":")
        if role in ("button", "textbox", "combobox", "checkbox", "img", "region", "navigation"):
            assert '"' in line, line


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone(open_page: OpenPage, load: Callable[..., None], scheme: str) -> None:
    page = open_page(color_scheme=scheme, **PHONE)
    expect(page.locator("#engine")).to_be_hidden()
    page.get_by_label("Message").fill(QUESTION)
    page.get_by_role("button", name="Send").tap()
    expect(page.locator("article.assistant .text")).to_have_text(ANSWER)
    page.locator("#settings summary").tap()
    wide = "document.documentElement.scrollWidth"
    assert page.evaluate(wide) == 390
    for control in page.locator("button:visible, summary:visible, .fields input:visible").all():
        box = control.bounding_box()
        assert box is not None and box["height"] >= 40, control.evaluate("at => at.outerHTML")
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    load(10, 100)
    page.get_by_role("button", name="Engine").tap()
    expect(page.locator("#chat")).to_be_hidden()
    expect(page.locator("#rows tr.runs")).to_have_count(8)
    assert page.evaluate(wide) == 390
    box = page.locator("#map").bounding_box()
    assert box is not None and box["width"] > 300 and box["y"] + box["height"] < 844
    page.get_by_role("button", name="Chat", exact=True).tap()
    expect(page.locator("article.assistant .text")).to_have_text(ANSWER)


CONTRASTS = """() => {
    const channel = (value) =>
        value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    const pen = document.createElement("canvas").getContext("2d");
    const luminance = (colour) => {
        pen.fillStyle = colour;
        pen.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].map((part) => channel(part / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (at) => {
        for (; at; at = at.parentElement) {
            const colour = getComputedStyle(at).backgroundColor;
            if (colour !== "rgba(0, 0, 0, 0)") return colour;
        }
    };
    const worst = {};
    const texts = "h1, h2, h3, p, button, figcaption, b, li, td, summary, label";
    for (const at of document.querySelectorAll(texts)) {
        if (!at.checkVisibility() || !at.innerText) continue;
        const [a, b] = [luminance(getComputedStyle(at).color), luminance(ground(at))];
        worst[at.id || at.tagName] = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    }
    return worst;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes_are_legible_and_can_be_chosen(open_page: OpenPage, scheme: str) -> None:
    page = open_page(color_scheme=scheme)
    expect(page.locator("#running")).to_have_text("0 of 8")
    ground = "getComputedStyle(document.body).backgroundColor"
    seen = {page.evaluate(ground)}
    for name in ("light", "dark"):
        page.locator("#theme").click()
        expect(page.locator("#theme")).to_have_text(f"Theme: {name}")
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 10
        assert {at: value for at, value in contrasts.items() if value < 4.5} == {}
        seen.add(page.evaluate(ground))
    assert len(seen) == 2
    page.reload()
    expect(page.locator("#theme")).to_have_text("Theme: dark")
    page.locator("#theme").click()
    expect(page.locator("#theme")).to_have_text("Theme: auto")


def test_the_page_asks_for_a_key(open_page: OpenPage, guarded: Server) -> None:
    page = open_page(guarded.url + "/llm", expected=("401 (Unauthorized)",))
    sent = Endless(page)
    asked: list[tuple[str, str | None]] = []
    page.on("request", lambda one: asked.append((one.url, one.headers.get("authorization"))))
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    expect(page.get_by_role("textbox", name="API key")).to_be_focused()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_text("The server does not know that key.")).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.locator("#feed")).to_have_text("An API key is needed.")
    page.get_by_role("button", name="Key", exact=True).click()
    page.keyboard.type(KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#running")).to_have_text("0 of 8")
    page.get_by_label("Model").select_option("second")
    page.locator("#settings summary").click()
    page.get_by_label("max_tokens").fill("3")
    send(page, QUESTION)
    expect(page.locator("article.assistant h3")).to_contain_text("3 tokens")
    assert sent.sent[0]["model"] == "second"
    # The model has no recommended settings, so the page shows the defaults.
    usual = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05}
    assert sent.sent[0].items() >= usual.items()
    shown = "temperature 0.8 · top_p 0.95 · min_p 0.05 · max_tokens 3"
    expect(page.locator("#chosen")).to_have_text(shown)
    page.get_by_label("temperature").fill("0.3")
    page.get_by_label("top_p").fill("")
    page.get_by_label("Model").select_option("first")
    expect(page.get_by_label("temperature")).to_have_value("0.3")  # the typed value stays
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("button", name="Chats").click()
    page.locator("#kept button").first.click()  # a chat goes on with its model
    expect(page.get_by_label("Model")).to_have_value("second")
    assert sent.headers[0]["authorization"] == f"Bearer {KEY}"
    feeds = [(url, key) for url, key in asked if "/dashboard/events" in url]
    assert {url.split("?")[1] for url, _ in feeds} == {"model=first", "model=second"}
    assert feeds and {key for _, key in feeds} == {f"Bearer {KEY}"}
    assert KEY not in "".join(url for url, _ in asked)
    assert page.evaluate("JSON.stringify(localStorage)").count(KEY) == 0
    page.reload()  # the tab keeps it
    expect(page.locator("#running")).to_have_text("0 of 8")
    other = open_page(guarded.url, expected=("401 (Unauthorized)",))  # another does not have it
    expect(other.get_by_role("dialog")).to_be_visible()


TOKENS = [
    {
        "token": "green",
        "logprob": -0.105,
        "bytes": None,
        "top_logprobs": [
            {"token": "green", "logprob": -0.105},
            {"token": "<b>\n", "logprob": -2.4},
        ],
    },
    {"token": " tea", "logprob": -0.0001, "top_logprobs": []},
    {"token": "\ufffd", "logprob": -1.0, "top_logprobs": []},
    {"token": "\ufffd", "logprob": -2.0, "top_logprobs": []},
]


def test_tokens_tell_their_probabilities(open_page: OpenPage) -> None:
    page = open_page(expected=("ERR_FAILED",))
    chunks = [
        chunk("green tea", logprobs={"content": TOKENS[:2]}),
        chunk("\u00e9", logprobs={"content": TOKENS[2:]}),
    ]
    sent = recorded(page, chunks, {"logprobs": True})
    page.locator("#settings summary").click()
    page.get_by_label("Mark tokens").check()
    send(page, "Which?")
    text = page.locator("article.assistant .text")
    expect(text).to_have_text("green tea\u00e9")
    assert sent[0]["logprobs"] is True and sent[0]["top_logprobs"] == 5
    tip = page.get_by_role("tooltip")
    expect(tip).to_be_hidden()
    text.get_by_text("green").hover()
    expect(tip).to_be_visible()
    rows = tip.locator("div").all_inner_texts()
    assert [row.split("\n") for row in rows] == [['"green"', "90.0%"], ['"<b>\\n"', "9.1%"]]
    box = tip.locator(".drawn code").bounding_box()
    assert box is not None and box["width"] > 40
    text.focus()
    page.keyboard.press("ArrowRight")
    expect(tip).to_contain_text('" tea"')
    expect(tip).to_contain_text("100%")
    page.keyboard.press("ArrowRight")  # a character of two tokens
    expect(tip.locator("div")).to_have_count(2)
    page.keyboard.press("ArrowLeft")
    expect(tip.locator("div")).to_have_count(1)
    page.get_by_label("Message").focus()
    expect(tip).to_be_hidden()
    page.get_by_label("Mark tokens").uncheck()
    send(page, "Which?")
    expect(page.locator("#status")).to_contain_text("Answer complete")
    expect(page.locator("article")).to_have_count(4)
    expect(page.locator(".token")).to_have_count(0)  # earlier answers are drawn anew
    assert "logprobs" not in sent[1]


def test_an_answer_cut_off_midway_says_so(open_page: OpenPage) -> None:
    page = open_page(expected=("ERR_FAILED",))
    failed = {"error": {"message": "the engine has ended", "code": "engine_dead"}}
    recorded(page, [chunk("half of "), failed], {})
    send(page, QUESTION)
    expect(page.locator("#problem")).to_have_text("the engine has ended")
    expect(page.locator("article.assistant h3")).to_contain_text("failed")
    expect(page.locator("article.assistant .text")).to_have_text("half of ")


def test_the_page_is_small_and_locked_down(server: Server) -> None:
    files = [one for one in FILES.rglob("*") if one.suffix in (".html", ".css", ".js", ".svg")]
    vendor = {one for one in files if one.parent.name == "vendor"}
    ours = set(files) - vendor
    # The sources are short enough to read in a sitting, and load without a delay.
    assert sum(one.stat().st_size for one in ours) < 80 << 10
    assert sum(one.stat().st_size for one in vendor) < 64 << 10
    assert all(one.read_text().count("\n") < 400 for one in ours)
    for one in files:
        name = one.relative_to(FILES).as_posix()
        path = "/" if name == "index.html" else f"/page/{name}"
        answer = server.request(path)
        assert (answer.status, answer.body) == (200, one.read_bytes())
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
        again = server.request(path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status, again.body) == (304, b"")
        assert "trusted-types 'none'" in policy and "script-src 'self'" in policy
    assert server.request("/page/__init__.py").status == 404
    assert server.request("/page/vendor/SOURCES.txt").status == 404
    assert server.request("/page/../page/main.js").status == 404
