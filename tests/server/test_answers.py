"""Answers: a stream says the same as a whole answer, in the words that clients expect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.live_server import Server

CHAT = {"messages": [{"role": "user", "content": "Reverse: s-t-o-n-e"}], "temperature": 0}
SAMPLED: dict[str, Any] = {
    "prompt": ["Reverse: ", "Sort: 3"],
    "n": 2,
    "seed": 11,
    "temperature": 1.5,
    "max_tokens": 24,
    "ignore_eos": True,
}


def streamed(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    answer = server.request(path, body | {"stream": True})
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    return answer.events()


def joined(events: list[Any], part: str) -> dict[int, dict[str, Any]]:
    """Join the chunks of a stream into choices, in order of arrival for each."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            one = choices.setdefault(choice["index"], {"text": "", "ids": [], "end": None})
            assert one["end"] is None, "something came after the end"
            delta = choice[part]
            one["text"] += (delta if part == "text" else delta.get("content")) or ""
            one["ids"] += choice.get("token_ids") or []
            one["end"] = choice["finish_reason"]
    return choices


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"echo": True},
        {"stop": ["e", "o"]},
        {"stop": ["a", "ab"], "include_stop_str_in_output": True},
        {"temperature": 100.0, "skip_special_tokens": False},
        {"stop_token_ids": list(range(100, 130))},
        {"min_tokens": 20, "ignore_eos": False},
    ],
    ids=str,
)
def test_streamed_completions_equal_whole_ones(server: Server, more: dict[str, Any]) -> None:
    body = SAMPLED | {"return_token_ids": True} | more
    whole = server.request("/v1/completions", body).json()
    *events, done = streamed(server, "/v1/completions", body)
    assert done == "[DONE]"
    choices = joined(events, "text")
    assert sorted(choices) == [0, 1, 2, 3]
    for choice in whole["choices"]:
        one = choices[choice["index"]]
        assert one == {
            "text": choice["text"],
            "ids": choice["token_ids"],
            "end": choice["finish_reason"],
        }
    assert len({choice["text"] for choice in whole["choices"]}) > 1
    assert all("usage" not in event for event in events)


def test_streamed_chats_equal_whole_ones(server: Server) -> None:
    body = CHAT | {"n": 3, "seed": 5, "temperature": 1.2, "max_tokens": 20}
    whole = server.request("/v1/chat/completions", body).json()
    usage = {"stream_options": {"include_usage": True}}
    *events, last, done = streamed(server, "/v1/chat/completions", body | usage)
    assert done == "[DONE]"
    assert last["choices"] == [] and last["usage"]["prompt_tokens"] == 32
    assert last["usage"] | {"prompt_tokens_details": 0} == whole["usage"] | {
        "prompt_tokens_details": 0
    }
    assert all(event["usage"] is None for event in events)
    assert [event["choices"][0]["delta"] for event in events[:3]] == [
        {"role": "assistant", "content": ""}
    ] * 3
    choices = joined(events, "delta")
    for choice in whole["choices"]:
        assert choices[choice["index"]]["text"] == choice["message"]["content"]
        assert choices[choice["index"]]["end"] == choice["finish_reason"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1


def test_usage_can_come_with_every_chunk(server: Server) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *events, _ = streamed(server, "/v1/chat/completions", CHAT | options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 10


@pytest.mark.parametrize("chat", [True, False])
def test_the_usage_of_a_chunk_counts_what_was_sent_by_then(server: Server, chat: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    more = {"stream_options": options, "return_token_ids": True, "n": 3, "seed": 5}
    body = (CHAT if chat else {"prompt": ["ab", "cde"]}) | {"max_tokens": 9, "temperature": 1.5}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    *events, last, _ = streamed(server, path, body | more)
    sent = 0
    for event in events:
        [choice] = event["choices"]
        sent += len(choice.get("token_ids") or [])
        usage = event["usage"]
        assert usage["completion_tokens"] == sent
        assert usage["total_tokens"] == sent + usage["prompt_tokens"]
    assert last["usage"]["completion_tokens"] == sent > 0
    if chat:
        assert [event["usage"]["completion_tokens"] for event in events[:3]] == [0, 0, 0]


def test_what_nobody_asked_for_is_null_where_vllm_writes_it(server: Server) -> None:
    whole = server.request("/v1/chat/completions", CHAT).json()
    [choice] = whole["choices"]
    none = ("prompt_logprobs", "prompt_token_ids", "kv_transfer_params", "service_tier")
    assert [whole[name] for name in none] == [None] * 4
    none = ("reasoning", "annotations", "audio", "function_call", "refusal")
    assert [choice["message"][name] for name in none] == [None] * 5
    assert choice["token_ids"] is None and "tool_calls" not in choice["message"]
    first, *middle, _ = streamed(server, "/v1/chat/completions", CHAT)
    assert first["prompt_token_ids"] is None and "token_ids" not in first["choices"][0]
    for event in middle:
        assert "prompt_token_ids" not in event and event["choices"][0]["token_ids"] is None
        assert not {"reasoning", "role", "tool_calls"} & event["choices"][0]["delta"].keys()
    for body in ({}, {"stream": True}):
        answer = server.request("/v1/completions", {"prompt": "ab"} | body)
        event = answer.events()[0] if body else answer.json()
        [choice] = event["choices"]
        assert choice["token_ids"] is choice["prompt_token_ids"] is None
        assert choice.get("prompt_logprobs", "none in streams") == (
            "none in streams" if body else None
        )
        assert ("service_tier" in event) == ("kv_transfer_params" in event) == (not body)


def test_streamed_responses_equal_whole_ones(server: Server) -> None:
    body = {"input": "Reverse: s-t-o-n-e", "temperature": 0, "instructions": "Be brief."}
    whole = server.request("/v1/responses", body).json()
    events = streamed(server, "/v1/responses", body)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * len(deltas),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = whole["output"][0]["content"][0]["text"]
    assert "".join(event["delta"] for event in deltas) == text == events[-4]["text"]
    assert events[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]
    assert whole["status"] == "completed" and whole["usage"]["output_tokens"] > 0


def test_responses_that_are_cut_say_so(server: Server) -> None:
    body = {"input": "Reverse: s-t-o-n-e", "temperature": 0, "max_output_tokens": 3}
    whole = server.request("/v1/responses", body).json()
    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert streamed(server, "/v1/responses", body)[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize(
    ("more", "reason", "sequence"),
    [
        ({"max_tokens": 20}, "end_turn", None),
        ({"max_tokens": 3}, "max_tokens", None),
        ({"max_tokens": 20, "stop_sequences": ["o"]}, "stop_sequence", "o"),
    ],
)
def test_streamed_messages_equal_whole_ones(
    server: Server, more: dict[str, Any], reason: str, sequence: str | None
) -> None:
    body = CHAT | more
    whole = server.request("/v1/messages", body).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    events = streamed(server, "/v1/messages", body)
    kinds = [event["type"] for event in events]
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    assert kinds == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * len(deltas),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    text = "".join(event["delta"]["text"] for event in deltas)
    assert text == whole["content"][0]["text"]
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_last_assistant_message_is_continued(server: Server) -> None:
    said = [*CHAT["messages"], {"role": "assistant", "content": "e-n-"}]
    body = {"messages": said, "temperature": 0, "max_tokens": 20}
    assert server.request("/v1/messages", body).json()["content"][0]["text"] == "o-t-s"
    chat = body | {"continue_final_message": True, "add_generation_prompt": False}
    choice = server.request("/v1/chat/completions", chat).json()["choices"][0]
    assert choice["message"]["content"] == "o-t-s"


def test_tokens_are_counted_alike(server: Server) -> None:
    body = {"messages": CHAT["messages"]}
    count = server.request("/v1/messages/count_tokens", body).json()["input_tokens"]
    tokenized = server.request("/tokenize", body | {"return_token_strs": True}).json()
    chat = server.request("/v1/chat/completions", CHAT | {"return_token_ids": True}).json()
    assert count == tokenized["count"] == chat["usage"]["prompt_tokens"] == 32
    assert tokenized["tokens"] == chat["prompt_token_ids"]
    assert len(tokenized["token_strs"]) == 32 and tokenized["max_model_len"] == 640


def test_text_and_its_token_ids_are_the_same_prompt(server: Server) -> None:
    text = "Reverse: s-t-o-n-e, twice"
    ids = server.request("/tokenize", {"prompt": text}).json()["tokens"]
    assert server.request("/detokenize", {"tokens": ids}).json()["prompt"] == text
    answers = [server.complete(prompt, echo=True).json() for prompt in (text, ids, [text], [ids])]
    assert len({json.dumps(answer["choices"]) for answer in answers}) == 1
    assert answers[0]["choices"][0]["text"].startswith(text)


def test_cached_tokens_are_counted(server: Server) -> None:
    prompt = list(range(50, 150))
    for cached in (0, 96):
        usage = server.complete(prompt, cache_salt="counted").json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] == 108


def test_a_salt_keeps_prefixes_apart(server: Server) -> None:
    prompt = list(range(60, 160))
    seen = [
        server.complete(prompt, cache_salt=salt).json()["usage"]["prompt_tokens_details"]
        for salt in ("one", "two", "one")
    ]
    assert [one["cached_tokens"] for one in seen] == [0, 0, 96]


def test_a_stop_string_that_begins_another(server: Server) -> None:
    for stop, text in ((["-n", "-n-o"], "e"), (["-n-o", "-n"], "e"), (["n-oX", "t"], "e-n-o-")):
        choice = server.request("/v1/chat/completions", CHAT | {"stop": stop}).json()["choices"][0]
        assert choice["message"]["content"] == text
        assert choice["stop_reason"] in stop


def test_the_openapi_document_holds_all_routes(server: Server) -> None:
    document = server.request("/openapi.json").json()
    assert document["openapi"].startswith("3.")
    for path, methods in document["paths"].items():
        for method in methods:
            body = {} if method == "post" else None
            answer = server.request(
                path.replace("{model}", "demo_model"), body, None, method.upper()
            )
            assert answer.status != 405 and b"nothing at this path" not in answer.body
    text = json.dumps(document)
    for name in document["components"]["schemas"]:
        assert f"#/components/schemas/{name}" in text or name in text


def test_what_the_server_says_about_itself(server: Server) -> None:
    [card] = server.request("/v1/models").json()["data"]
    assert card["id"] == "demo_model" and card["max_model_len"] == 640
    assert server.request("/v1/models/demo_model").json() == card
    assert server.request("/ready").status == 200
    assert server.request("/version").json()["version"]
    started = "\n".join(server.log)
    [real] = [line for line in server.log if "bundled" in line]
    assert "jaxserve serve Qwen/Qwen3-0.6B " in real and "the path of a GGUF file" in real
    for told in (
        "weights",
        "compile",
        "jaxserve: model: LlamaForCausalLM, 2.6 MB of weights on ",
        "jaxserve: cache: 1.3 MB for 640 tokens, in float32",
        "jaxserve: limits: 8 sequences together, each of 640 tokens at most; more requests wait",
        "jaxserve: programs: ",
        "ready at http://127.0.0.1:",
    ):
        assert told in started


def test_metrics_count_requests(server: Server) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total", "request_success_total")
    before = [server.metric(name) for name in names]
    first = server.metric("time_to_first_token_seconds_count")
    server.complete([5, 6, 7], 4, ignore_eos=True)
    assert [server.metric(name) for name in names] == [
        before[0] + 3,
        before[1] + 4,
        before[2] + 1,
    ]
    assert server.metric("time_to_first_token_seconds_count") == first + 1
    assert server.metric("request_success_total", finished_reason="length") > 0
    text = server.request("/metrics").body.decode()
    assert 'jaxserve:cache_config_info{block_size="16"' in text


def test_labels_do_not_grow_with_requests(server: Server) -> None:
    def series() -> set[str]:
        lines = server.request("/metrics").body.decode().splitlines()
        return {line.rpartition(" ")[0] for line in lines}

    server.complete("a", model="nothing", user="someone")
    before = series()
    for number in range(20):
        server.complete("a", model=f"nothing-{number}", user=f"user-{number}")
    assert series() == before
