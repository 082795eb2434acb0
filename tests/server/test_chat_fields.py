"""Fields of conversations as vLLM and older clients have them: echo, roles, functions, ids."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from jaxserve.server.api.conversations import as_tools
from jaxserve.server.schema.openai import ChatRequest
from tests.support.live_server import Server

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Reverse: s-t-o-n-e"}]
BEGUN = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "e-n"}]}]
GOOD = {"temperature": 0, "max_tokens": 12}


def ask(server: Server, messages: Any, **fields: Any) -> dict[str, Any]:
    answer = server.request(CHAT, {"messages": messages} | GOOD | fields)
    assert answer.status == 200, answer.body
    return answer.json()


def streamed(server: Server, messages: Any, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": messages, "stream": True} | GOOD | fields
    events = server.request(CHAT, body).events()
    assert events[-1] == "[DONE]"
    return [choice["delta"] for event in events[:-1] for choice in event["choices"]]


def test_an_answer_repeats_the_message_that_it_continues(server: Server) -> None:
    """vLLM prepends the last message if the answer has its role."""
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    plain = ask(server, BEGUN, **fields)["choices"][0]["message"]
    echoed = ask(server, BEGUN, echo=True, **fields)
    message = echoed["choices"][0]["message"]
    assert message["content"] == "e-n" + plain["content"] and message["role"] == "assistant"
    assert echoed["usage"] == ask(server, BEGUN, **fields)["usage"] | {
        "prompt_tokens_details": echoed["usage"]["prompt_tokens_details"]
    }
    deltas = streamed(server, BEGUN, echo=True, **fields)
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[1] == {"content": "e-n"}
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    parts = [{"type": "text", "text": text} for text in ("e", "n")]
    several = [*USER, {"role": "assistant", "content": parts}]
    content = ask(server, several, echo=True, **fields)["choices"][0]["message"]["content"]
    assert content.startswith("e\nn")
    # An assistant's answer never repeats a user's message.
    other = ask(server, USER, echo=True)["choices"]
    assert other == ask(server, USER)["choices"]
    deltas = streamed(server, USER, echo=True)
    assert "".join(delta.get("content", "") for delta in deltas) == other[0]["message"]["content"]


def test_a_message_of_another_role_is_continued_in_it(server: Server) -> None:
    fields = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
    message = ask(server, [{"role": "user", "content": "Reverse: s"}], **fields)
    assert message["choices"][0]["message"]["role"] == "user"
    assert message["choices"][0]["message"]["content"].startswith("Reverse: s")


def test_an_echo_with_logprobs_has_those_of_the_prompt(server: Server) -> None:
    answer = ask(server, USER, echo=True, logprobs=True, top_logprobs=2)
    named = ask(server, USER, logprobs=True, top_logprobs=2, prompt_logprobs=2)
    assert answer["prompt_logprobs"] == named["prompt_logprobs"] and named["prompt_logprobs"][1]
    assert ask(server, USER, logprobs=True)["prompt_logprobs"] is None


def test_the_prompt_as_text(server: Server) -> None:
    answer = ask(server, USER, return_prompt_text=True, return_token_ids=True)
    body = {"tokens": answer["prompt_token_ids"]}
    assert answer["prompt_text"] == server.request("/detokenize", body).json()["prompt"]
    assert USER[0]["content"] in answer["prompt_text"]
    body = {"messages": USER, "stream": True, "return_prompt_text": True, "n": 2} | GOOD
    events = server.request(CHAT, body).events()[:-1]
    assert {event.get("prompt_text") for event in events} == {answer["prompt_text"], None}
    assert ask(server, USER)["prompt_text"] is None


def test_special_tokens_before_a_conversation(server: Server) -> None:
    def prompt(**fields: Any) -> list[int]:
        return ask(server, USER, return_token_ids=True, **fields)["prompt_token_ids"]

    whole = server.request("/tokenize", {"prompt": "a"}).json()["tokens"]
    bare = server.request("/tokenize", {"prompt": "a", "add_special_tokens": False}).json()[
        "tokens"
    ]
    assert prompt(add_special_tokens=True) == whole[: len(whole) - len(bare)] + prompt()
    assert prompt(add_special_tokens=False) == prompt()


def test_the_id_of_an_answer(server: Server) -> None:
    for path, body, kind in (
        (CHAT, {"messages": USER}, "chatcmpl"),
        ("/v1/completions", {"prompt": "a"}, "cmpl"),
    ):
        asked = body | GOOD | {"request_id": "mine-7"}
        assert server.request(path, asked).json()["id"] == f"{kind}-mine-7"
        named = server.request(path, asked, {"x-request-id": "theirs"})
        assert named.json()["id"] == f"{kind}-theirs" and named.headers["x-request-id"] == "theirs"
        free = [server.request(path, body | GOOD).json()["id"] for _ in range(2)]
        assert free[0] != free[1] and free[0].startswith(f"{kind}-")


WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"hot": {"type": "boolean"}},
        "required": ["hot"],
    },
}


def test_functions_of_older_clients(server: Server) -> None:
    fields = {"functions": [WEATHER], "function_call": {"name": "weather"}, "max_tokens": 100}
    choice = ask(server, USER, **fields)["choices"][0]
    call = choice["message"]["function_call"]
    assert call["name"] == "weather" and set(json.loads(call["arguments"])) == {"hot"}
    assert "tool_calls" not in choice["message"] and choice["message"]["content"] is None
    as_tool = ask(
        server,
        USER,
        tools=[{"type": "function", "function": WEATHER}],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=100,
    )["choices"][0]
    assert as_tool["message"]["tool_calls"][0]["function"] == call
    assert choice["finish_reason"] == as_tool["finish_reason"]
    deltas = streamed(server, USER, **fields)
    parts = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert parts[0]["name"] == "weather" and not any("tool_calls" in delta for delta in deltas)
    assert "".join(part.get("arguments", "") for part in parts) == call["arguments"]
    free = ask(server, USER, functions=[WEATHER], function_call="none")["choices"]
    assert free == ask(server, USER)["choices"]


def test_calls_and_results_of_functions_are_those_of_tools(server: Server) -> None:
    call = {"name": "weather", "arguments": '{"hot": true}'}
    older = [
        *USER,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "yes"},
    ]
    newer = [
        *USER,
        {"role": "assistant", "tool_calls": [{"id": "call_1", "function": call}]},
        {"role": "tool", "name": "weather", "content": "yes", "tool_call_id": "call_1"},
    ]
    answers = [ask(server, m, return_token_ids=True)["prompt_token_ids"] for m in (older, newer)]
    assert answers[0] == answers[1]
    bodies = [msgspec.convert({"messages": messages}, ChatRequest) for messages in (older, newer)]
    assert as_tools(bodies[0]) == as_tools(bodies[1]) == bodies[1]
