"""Prompts rendered to token ids, and token ids completed: vLLM's endpoints for servers apart."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.live_server import Server

TEXT, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
USER = [{"role": "user", "content": "Reverse: s-t-o-n-e"}]
GREEDY = {"temperature": 0, "max_tokens": 8}


def generate(server: Server, token_ids: list[int], **fields: Any) -> dict[str, Any]:
    own = fields.pop("sampling_params", GREEDY)
    body = {"token_ids": token_ids, "sampling_params": own} | fields
    answer = server.request(GENERATE, body)
    assert answer.status == 200, answer.body
    return answer.json()


def test_token_ids_are_completed(server: Server) -> None:
    ids = server.request("/tokenize", {"messages": USER}).json()["tokens"]
    scored = GREEDY | {"logprobs": 2, "stop": None, "bad_words": [], "detokenize": True}
    body = {"prompt": ids, **GREEDY, "logprobs": 2, "return_token_ids": True}
    expected = server.request(TEXT, body).json()
    answer = generate(server, ids, sampling_params=scored, request_id="mine")
    [choice], [other] = answer["choices"], expected["choices"]
    for name in ("token_ids", "finish_reason", "stop_reason"):
        assert choice[name] == other[name]
    assert answer["request_id"] == "mine" and "text" not in choice
    assert answer["usage"]["total_tokens"] == expected["usage"]["total_tokens"]
    entries = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == choice["token_ids"]
    assert [entry["logprob"] for entry in entries] == other["logprobs"]["token_logprobs"]
    for entry in entries:
        first, *others = entry["top_logprobs"]
        assert first == {name: entry[name] for name in ("token_id", "logprob", "rank")}
        assert [other["rank"] for other in others] == sorted(other["rank"] for other in others)
        assert len(others) in (1, 2)
    text = generate(server, ids, sampling_params=scored, output_mode="text", return_token_ids=True)
    assert text["choices"][0]["text"] == other["text"] and text["prompt_token_ids"] == ids
    assert text["choices"][0]["logprobs"]["content"][0]["token"] == other["logprobs"]["tokens"][0]


def test_token_ids_as_events(server: Server) -> None:
    whole = generate(server, [5, 6, 7])
    body = {"token_ids": [5, 6, 7], "sampling_params": GREEDY, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "return_token_ids": True}
    *events, done = server.request(GENERATE, body).events()
    ids = [i for event in events for choice in event["choices"] for i in choice["token_ids"]]
    assert done == "[DONE]" and ids == whole["choices"][0]["token_ids"]
    assert events[0]["prompt_token_ids"] == [5, 6, 7]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [events[-1]["usage"][n] for n in counts] == [whole["usage"][n] for n in counts]


SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
CHATS: list[dict[str, Any]] = [
    {},
    {"n": 2, "temperature": 1, "seed": 7, "top_k": 5, "min_p": 0.1, "max_tokens": 5},
    {"response_format": FORM, "max_tokens": 60},
    {"structured_outputs": {"choice": ["left", "right"], "disable_any_whitespace": True}},
    {"response_format": {"type": "json_object"}, "temperature": 1, "seed": 3},
    {"stop": ["-t"], "logit_bias": {"77": -5}, "bad_words": ["zz"], "presence_penalty": 0.5},
    {"tools": [{"function": {"name": "f"}}], "tool_choice": "required", "max_tokens": 60},
]


@pytest.mark.parametrize("fields", CHATS, ids=lambda fields: ",".join(fields) or "plain")
def test_what_is_rendered_generates_the_answer(server: Server, fields: dict[str, Any]) -> None:
    body = {"messages": USER, **GREEDY, **fields, "return_token_ids": True}
    answer = server.request(CHAT, body).json()
    rendered = server.request(f"{CHAT}/render", body | {"request_id": "a"}).json()
    assert rendered["token_ids"] == answer["prompt_token_ids"]
    assert rendered["request_id"] == "chatcmpl-a"
    made = server.request(GENERATE, rendered).json()
    assert [choice["token_ids"] for choice in made["choices"]] == [
        choice["token_ids"] for choice in answer["choices"]
    ]


def test_prompts_and_messages_are_rendered(server: Server) -> None:
    body = {"prompt": ["ab", "cd"], "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    rendered = server.request(f"{TEXT}/render", body | {"request_id": "a"}).json()
    choices = server.request(TEXT, body).json()["choices"]
    for made, choice in zip(rendered, choices, strict=True):
        assert made["token_ids"] == choice["prompt_token_ids"]
        found = server.request(GENERATE, made).json()["choices"][0]
        assert found["token_ids"] == choice["token_ids"]
    assert [made["request_id"] for made in rendered] == ["cmpl-a-0", "cmpl-a-1"]
    chat = {"messages": USER, "max_tokens": 5, "temperature": 0}
    made = server.request("/v1/messages/render", chat).json()
    ids = server.request("/tokenize", {"messages": USER}).json()["tokens"]
    assert made["token_ids"] == ids and made["sampling_params"]["max_tokens"] == 5
    assert made["sampling_params"]["temperature"] == 0


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("temperature", {"temperature": -1}),
        ("n", {"n": 0}),
        ("stop", {"stop": [""]}),
        ("watermarking", {"watermarking": True}),
        ("structured_outputs", {"structured_outputs": {"regex": "("}}),
        ("thinking_token_budget", {"thinking_token_budget": 5}),
        ("thinking_token_budget", {"thinking_token_budget": "a"}),
        ("logit_bias", {"logit_bias": {"x": 1}}),
        ("max_tokens", {"max_tokens": "a"}),
        ("use_beam_search", {"use_beam_search": True}),
        ("echo", {"echo": True}),
    ],
    ids=str,
)
def test_settings_that_are_wrong_are_named(server: Server, name: str, own: dict[str, Any]) -> None:
    answer = server.request(GENERATE, {"token_ids": [5], "sampling_params": own})
    assert answer.status == 400 and answer.error["param"] == name, answer.body
