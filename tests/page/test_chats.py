"""Chats: edited, regenerated, copied, kept in the browser, with thoughts and calls of tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.page.conftest import Endless, OpenPage
from tests.page.recorded import chunk, recorded, send

QUESTION, ANSWER = "Reverse: s-t-o-n-e", "e-n-o-t-s"
CLIPBOARD = {"permissions": ["clipboard-read", "clipboard-write"]}


def texts(page: Page) -> list[str]:
    return page.locator("article .text").all_inner_texts()


def act(page: Page, name: str, index: int) -> None:
    page.locator("article").nth(index).get_by_role("button", name=name, exact=True).click()


def ask(page: Page, text: str, answers: int) -> None:
    """Send a question, and wait for the end of the answer."""
    send(page, text)
    expect(page.locator("article.assistant:not([aria-busy])")).to_have_count(answers)


def contents(body: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(message["role"], message.get("content")) for message in body["messages"]]


def replies(*answers: str) -> list[list[dict[str, Any]]]:
    return [[chunk(answer, "stop")] for answer in answers]


def test_editing_goes_on_from_there(open_page: OpenPage) -> None:
    page = open_page(expected=("ERR_FAILED",))
    first, *later = replies("one", "two", "three", "four", "five")
    sent = recorded(page, first, {}, *later)
    ask(page, "first", 1)
    page.locator("article").evaluate_all("all => all.forEach((one) => (one.dataset.kept = ''))")
    ask(page, "second", 2)
    expect(page.locator("[data-kept]")).to_have_count(2)  # a new turn draws no earlier one again
    act(page, "Edit", 0)
    editor = page.get_by_label("Edited text")
    expect(editor).to_be_focused()
    expect(editor).to_have_value("first")
    page.keyboard.press("Escape")  # as it was
    expect(editor).to_have_count(0)
    expect(page.locator("article").first.get_by_role("button", name="Edit")).to_be_focused()
    act(page, "Edit", 2)
    editor.fill("other")
    page.keyboard.press("Enter")
    expect(page.locator("article.assistant .text").last).to_have_text("three")
    assert texts(page) == ["first", "one", "other", "three"]
    assert contents(sent[2]) == [("user", "first"), ("assistant", "one"), ("user", "other")]
    # An answer is changed without a request, and the next request builds on it.
    act(page, "Edit", 1)
    editor.fill("mine")
    page.get_by_role("button", name="Keep").click()
    expect(page.locator("article")).to_have_count(2)
    assert len(sent) == 3
    expect(page.locator("[data-kept]")).to_have_count(1)
    ask(page, "third", 2)
    assert contents(sent[3]) == [("user", "first"), ("assistant", "mine"), ("user", "third")]


def test_the_last_answer_is_regenerated(open_page: OpenPage) -> None:
    page = open_page(expected=("ERR_FAILED",))
    first, *later = replies("one", "two", "three")
    failed = [{"error": {"message": "the engine has ended", "code": "engine_dead"}}]
    sent = recorded(page, first, {}, *later, failed)
    ask(page, "first", 1)
    ask(page, "second", 2)
    expect(page.get_by_role("button", name="Regenerate")).to_have_count(1)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator("article.assistant .text").last).to_have_text("three")
    assert contents(sent[2]) == contents(sent[1])
    page.get_by_role("button", name="Regenerate").click()  # it fails: the old answer comes back
    expect(page.locator("#problem")).to_have_text("the engine has ended")
    assert texts(page) == ["first", "one", "second", "three"]


@pytest.mark.parametrize("secure", [True, False])
def test_messages_and_code_are_copied(open_page: OpenPage, secure: bool) -> None:
    """A page that came by plain HTTP from another machine has no `navigator.clipboard`."""
    page = open_page(expected=("ERR_FAILED",), **CLIPBOARD)
    if not secure:
        page.add_init_script(
            "Object.defineProperty(Navigator.prototype, 'clipboard', {get() {"
            " return window.clipboardOfTests ? window.clipboardOfTests : undefined }})"
        )
    source = "Here:\n\n```py\nx = 1 < 2\n  y\n```\n"
    recorded(page, [chunk(source, "stop")], {})
    ask(page, "code", 1)
    paste = page.get_by_label("Message", exact=True)
    for name, text in (("Copy code", "x = 1 < 2\n  y"), ("Copy", source)):
        page.locator("article").last.get_by_role("button", name=name, exact=True).click()
        expect(page.locator("#status")).to_have_text("Copied")
        paste.fill("")
        paste.focus()
        page.keyboard.press("Control+V")
        expect(paste).to_have_value(text)


def test_a_system_prompt_goes_first(open_page: OpenPage) -> None:
    page = open_page(expected=("ERR_FAILED",))
    sent = recorded(page, [chunk("Arr.", "stop")], {})
    page.locator("#settings summary").click()
    page.get_by_label("System prompt").fill("You are a pirate.")
    expect(page.locator("#chosen")).to_have_text("system prompt · as the model recommends")
    ask(page, "Hello", 1)
    assert contents(sent[0]) == [("system", "You are a pirate."), ("user", "Hello")]
    page.reload()  # it is the chat's
    expect(page.locator("article")).to_have_count(2)
    ask(page, "Again", 2)
    assert contents(sent[1])[0] == ("system", "You are a pirate.")


def open_chats(page: Page) -> None:
    page.get_by_role("button", name="Chats").click()


def titles(page: Page) -> list[str]:
    return page.locator("#kept button:first-child").all_inner_texts()


def test_chats_are_kept_and_deleted(open_page: OpenPage) -> None:
    page = open_page()
    open_chats(page)
    expect(page.locator("#chats")).to_contain_text("There are none yet.")
    page.keyboard.press("Escape")
    ask(page, QUESTION, 1)
    figures = page.locator("article.assistant h3").inner_text()
    page.get_by_role("button", name="New chat").click()
    ask(page, "What is 47 + 8?", 1)
    page.reload()  # the tab shows its last chat
    expect(page.locator("article")).to_have_count(2)
    expect(page.locator("article.user .text")).to_have_text("What is 47 + 8?")
    open_chats(page)
    assert titles(page) == ["What is 47 + 8?", QUESTION]
    expect(page.locator("#kept [aria-current]")).to_have_text("What is 47 + 8?")
    page.locator("#kept").get_by_role("button", name=QUESTION, exact=True).click()
    expect(page.locator("article.assistant .text")).to_have_text(ANSWER)
    assert page.locator("article.assistant h3").inner_text() == figures
    ask(page, QUESTION, 2)  # which goes on
    open_chats(page)
    assert titles(page) == [QUESTION, "What is 47 + 8?"]
    page.get_by_role("button", name="Delete: What is 47 + 8?").click()
    expect(page.locator("#kept li")).to_have_count(1)
    expect(page.locator("article")).to_have_count(4)
    page.get_by_role("button", name="Delete all").click()
    expect(page.locator("#kept li")).to_have_count(1)  # not at the first click
    page.get_by_role("button", name="Really delete all").click()
    expect(page.locator("#kept li")).to_have_count(0)
    expect(page.locator("article")).to_have_count(0)
    assert page.evaluate("Object.keys(localStorage).filter((key) => key.includes('chat'))") == []


def test_a_chat_that_is_left_while_it_answers_keeps_what_came(open_page: OpenPage) -> None:
    page = open_page()
    Endless(page)
    send(page, QUESTION)
    expect(page.locator("article.assistant .text")).to_contain_text("e")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)
    expect(page.locator("#running")).to_have_text("0 of 8")
    open_chats(page)
    page.locator("#kept").get_by_role("button", name=QUESTION, exact=True).click()
    expect(page.locator("article.assistant h3")).to_contain_text("stopped")
    expect(page.locator("article.assistant .text")).to_contain_text("e")
    send(page, QUESTION)
    expect(page.locator("article.assistant .text").last).to_contain_text("e")
    page.reload()  # in the middle of an answer
    expect(page.locator("article")).to_have_count(4)
    expect(page.locator("article[aria-busy]")).to_have_count(0)


FULL = """() => {
    for (let size = 1 << 20; size; size = size >> 1) {
        try {
            for (let i = 0; ; i++) localStorage.setItem(`junk-${size}-${i}`, "x".repeat(size));
        } catch {}
    }
}"""
FORBIDDEN = """for (const name of ["localStorage", "sessionStorage"]) {
    const get = () => { throw new DOMException("no", "SecurityError"); };
    Object.defineProperty(window, name, { get });
}"""


def test_full_storage_loses_no_chat(open_page: OpenPage) -> None:
    page = open_page()
    ask(page, QUESTION, 1)
    page.evaluate(FULL)
    ask(page, "What is 47 + 8?", 2)
    expect(page.locator("#problem")).to_contain_text("the browser's storage is full")
    page.locator("#theme").click()
    expect(page.locator("#theme")).to_have_text("Theme: light")
    ask(page, QUESTION, 3)
    open_chats(page)
    assert titles(page) == [QUESTION]  # as it was when there was room
    page.get_by_role("button", name="Close").click()
    page.reload()
    expect(page.locator("article")).to_have_count(2)


def test_forbidden_storage_keeps_chats_in_the_tab(open_page: OpenPage) -> None:
    page = open_page()
    page.add_init_script(FORBIDDEN)
    page.reload()
    ask(page, QUESTION, 1)
    page.get_by_role("button", name="New chat").click()
    open_chats(page)
    expect(page.locator("#where")).to_contain_text("until this tab is closed")
    page.locator("#kept").get_by_role("button", name=QUESTION, exact=True).click()
    expect(page.locator("article.assistant .text")).to_have_text(ANSWER)
    page.locator("#theme").click()
    expect(page.locator("#theme")).to_have_text("Theme: light")


def test_kept_chats_are_bounded(open_page: OpenPage) -> None:
    """Beyond a number or a size the oldest chats go first; damaged entries are passed over."""
    page = open_page()
    kept = page.evaluate(
        """async () => {
            const chats = await import("/page/chats.js");
            const write = (title, size, when) => {
                const chat = { ...chats.fresh(), messages: [{ role: "user", content: title }] };
                chat.messages.push({ role: "assistant", content: "x".repeat(size) });
                const now = Date.now;
                Date.now = () => when;
                const problem = chats.save(chat);
                Date.now = now;
                return problem;
            };
            localStorage.setItem("jaxserve.chat.broken", "{");
            localStorage.setItem("jaxserve.chat.other", "17");
            for (let i = 0; i < 60; i++) write(`chat ${i}`, 10, i);
            const many = chats.all().map((chat) => chat.title);
            const problems = [write("large", 1_900_000, 61), write("huge", 2_000_000, 62)];
            const titles = chats.all().map((chat) => chat.title);
            write("larger", 1_999_000, 63);
            return { many, problems, titles, last: chats.all().map((chat) => chat.title) };
        }"""
    )
    assert kept["many"] == [f"chat {number}" for number in range(59, 9, -1)]
    assert kept["problems"] == ["", "This chat has become too long to be kept."]
    assert kept["titles"] == ["large", *(f"chat {number}" for number in range(59, 10, -1))]
    assert kept["last"][0] == "larger" and "large" not in kept["last"]


def thought(text: str) -> dict[str, Any]:
    return chunk(delta={"content": None, "reasoning": text, "reasoning_content": text})


def part(index: int, text: str, name: str | None = None) -> dict[str, Any]:
    function = {"arguments": text} | ({"name": name} if name else {})
    call = {"index": index, "function": function} | ({"id": f"call-{index}"} if name else {})
    return chunk(delta={"content": None, "tool_calls": [call]})


def test_thoughts_are_folded_with_their_time(open_page: OpenPage) -> None:
    page = open_page(expected=("ERR_FAILED",))
    sent = recorded(page, [thought("Let me <b>"), thought(" see."), chunk("**55**", "stop")], {})
    ask(page, "What is 47 + 8?", 1)
    thoughts = page.locator("article.assistant .thoughts")
    expect(thoughts.locator("summary")).to_contain_text("Thought for")
    expect(thoughts.locator("div")).to_be_hidden()
    thoughts.locator("summary").click()
    expect(thoughts.locator("div")).to_have_text("Let me <b> see.")
    expect(page.locator("article.assistant .text")).to_have_text("55")
    words = thoughts.locator("summary").inner_text()
    page.reload()
    expect(thoughts.locator("summary")).to_have_text(words)
    ask(page, "And?", 2)
    assert sent[1]["messages"][1] == {"role": "assistant", "content": "**55**"}


def test_calls_are_folded_and_take_results(open_page: OpenPage) -> None:
    page = open_page(expected=("ERR_FAILED",))
    calls = [
        thought("I shall look."),
        part(0, "", "weather"),
        part(0, '{"city": '),
        part(0, '"Rome"}'),
        part(1, '{"q": 1}', "search"),
        chunk("", "tool_calls"),
    ]
    sent = recorded(page, calls, {}, [chunk("Sunny.", "stop")])
    page.locator("#settings summary").click()
    tools = page.get_by_label("Tools")
    tools.fill("[{")
    send(page, "How is Rome?")
    expect(page.locator("#problem")).to_contain_text("tools must be JSON: ")
    expect(tools).to_be_focused()
    expect(tools).to_have_attribute("aria-invalid", "true")
    tools.fill('{"name": "weather"}')
    send(page, "How is Rome?")
    expect(page.locator("#problem")).to_have_text("tools must be a list, [{...}, ...]")
    weather = {"name": "weather", "parameters": {"type": "object"}}
    tools.fill(json.dumps([weather, {"type": "function", "function": {"name": "search"}}]))
    page.locator("#settings summary").click()
    ask(page, "How is Rome?", 1)
    assert sent[0]["tools"] == [
        {"type": "function", "function": weather},
        {"type": "function", "function": {"name": "search"}},
    ]
    folded = page.locator("article.assistant .calls details")
    assert folded.locator("summary").all_inner_texts() == ["Call of weather", "Call of search"]
    expect(folded.first.locator("pre")).to_be_hidden()
    folded.first.locator("summary").click()
    expect(folded.first.locator("pre")).to_have_text('{\n  "city": "Rome"\n}')
    page.reload()
    page.get_by_label("Result of weather").fill("25 degrees")
    page.get_by_label("Result of search").fill("none")
    page.get_by_role("button", name="Send results").click()
    expect(page.locator("article.assistant .text").last).to_have_text("Sunny.")
    expect(page.locator("#results")).to_have_count(0)
    [_, answer, first, second] = sent[1]["messages"]
    assert answer["content"] is None and answer["reasoning_content"] == "I shall look."
    functions = [call["function"] for call in answer["tool_calls"]]
    assert functions[0] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert [call["id"] for call in answer["tool_calls"]] == ["call-0", "call-1"]
    assert first == {
        "role": "tool",
        "content": "25 degrees",
        "name": "weather",
        "tool_call_id": "call-0",
    }
    assert second["tool_call_id"] == "call-1"
