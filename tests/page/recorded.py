"""Answers from a record, for texts that the engine of these tests would not generate."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Page, Route, expect

Chunks = list[dict[str, Any]]


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send", exact=True).click()


def recorded(
    page: Page, chunks: Chunks, capabilities: dict[str, bool], *later: Chunks
) -> list[dict[str, Any]]:
    """Answer from records in turn, and then from the last, and return the received requests."""
    sent: list[dict[str, Any]] = []
    records = [chunks, *later]
    card = {"id": "recorded", "object": "model", "capabilities": capabilities}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [card]}))
    page.route("**/dashboard/events*", lambda route: route.abort())

    def answer(route: Route) -> None:
        record = records[min(len(sent), len(records) - 1)]
        sent.append(json.loads(route.request.post_data or ""))
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in record]
        body = "".join([*events, "data: [DONE]\n\n"])
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer)
    page.reload()
    expect(page.locator("#model")).to_have_value("recorded")
    return sent


def chunk(text: str = "", reason: str | None = None, **fields: Any) -> dict[str, Any]:
    """Return an event of a stream, where `delta` among the fields replaces the text."""
    delta = {"content": text} | fields.pop("delta", {})
    choice = {"index": 0, "delta": delta, "finish_reason": reason, **fields}
    return {"object": "chat.completion.chunk", "choices": [choice]}
