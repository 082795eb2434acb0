"""Responses that are kept: continued, drawn in the background, listed, forgotten, bounded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.server.kept.response_store import OVERHEAD_BYTES, ResponseStore, Turn
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.openai import NamedTool
from jaxserve.server.schema.response_items import (
    InputItem,
    ResponseTool,
    ToolChoice,
    shown_items,
)
from jaxserve.server.schema.responses import ResponsesRequest, as_chat
from tests.server.conftest import KEYS
from tests.support.live_server import Server

MODEL, PATH = "demo_model", "/v1/responses"
STONE, ENOTS = "Reverse: s-t-o-n-e", "e-n-o-t-s"
LONG: dict[str, Any] = {"max_output_tokens": 400, "extra_body": {"ignore_eos": True}}
GREEDY: Any = {"model": MODEL, "temperature": 0}


def to(server: Server) -> openai.OpenAI:
    key = server.key or "any"
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with to(server) as client:
        yield client


@pytest.fixture
def slowly(slow: Server) -> Iterator[openai.OpenAI]:
    with to(slow) as client:
        yield client


def seen(answer: Any) -> list[int]:
    """Return the token ids of a response's prompt."""
    return answer.input_messages[0]["tokens"]


def test_a_response_is_continued_as_if_all_were_sent(client: openai.OpenAI) -> None:
    shown: Any = {**GREEDY, "extra_body": {"enable_response_messages": True}}
    first = client.responses.create(**GREEDY, input=STONE, instructions="Be brief.")
    assert first.output_text == ENOTS and first.store is True  # type: ignore[attr-defined]
    second = client.responses.create(**shown, input="Again: a-b", previous_response_id=first.id)
    third = client.responses.create(**shown, input="And: c", previous_response_id=second.id)
    said: Any = [
        {"role": "user", "content": STONE},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Again: a-b"},
    ]
    assert second.previous_response_id == first.id
    assert seen(second) == seen(client.responses.create(**shown, input=said))
    said += [
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "And: c"},
    ]
    whole = client.responses.create(**shown, input=said)
    assert seen(third) == seen(whole) and third.output_text == whole.output_text
    # Instructions apply to their own request only.
    said.insert(0, {"role": "system", "content": "Be kind."})
    own: Any = {"instructions": "Be kind.", "previous_response_id": second.id}
    assert seen(client.responses.create(**shown, input="And: c", **own)) == seen(
        client.responses.create(**shown, input=said)
    )
    # A forgotten response lives on in the responses that continue it.
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    again = client.responses.create(**shown, input="And: c", previous_response_id=second.id)
    assert seen(again) == seen(third)


def test_a_kept_response_is_what_was_answered(client: openai.OpenAI) -> None:
    settings: Any = {
        "metadata": {"a": "b"},
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "service_tier": "flex",
        "text": {"verbosity": "low"},
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "top_logprobs": 1,
        "truncation": "auto",
        "user": "u",
    }
    made = client.responses.create(**GREEDY, input=STONE, **settings)
    kept = client.responses.retrieve(made.id)
    assert kept.to_dict() == made.to_dict()
    given = made.to_dict()
    for name in settings.keys() - {"text", "include"}:
        assert given[name] == settings[name], name
    assert given["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    with client.responses.stream(**GREEDY, input=STONE) as stream:
        final = stream.get_final_response()
    assert client.responses.retrieve(final.id).output_text == final.output_text == ENOTS
    unkept = client.responses.create(**GREEDY, input=STONE, store=False)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.retrieve(unkept.id)


def test_the_items_of_an_input_are_listed(client: openai.OpenAI) -> None:
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}], "id": "msg_mine"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "9"}],
        },
        {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "x y"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": STONE},
    ]
    made = client.responses.create(**GREEDY, input=items)
    listed = list(client.responses.input_items.list(made.id, order="asc", limit=2))
    assert [item.type for item in listed] == [item.get("type", "message") for item in items]
    assert len({item.id for item in listed}) == len(items) and listed[1].id == "msg_mine"
    texts = [item.content[0].text for item in listed if item.type == "message"]  # type: ignore
    assert texts == ["Be brief.", "a", "b", STONE]
    page = client.responses.input_items.list(made.id, limit=2)
    assert [item.id for item in page.data] == [listed[-1].id, listed[-2].id]
    # An item can be sent again by its id alone.
    shown: Any = {**GREEDY, "extra_body": {"enable_response_messages": True}}
    known: Any = [{"type": "item_reference", "id": listed[-1].id}]
    again = client.responses.create(**shown, input=known)
    assert seen(again) == seen(client.responses.create(**shown, input=STONE))
    [output] = again.output
    known = [*known, {"type": "item_reference", "id": output.id}, items[-1]]
    plain = [items[-1], {"role": "assistant", "content": again.output_text}, items[-1]]
    assert seen(client.responses.create(**shown, input=known)) == seen(
        client.responses.create(**shown, input=plain)
    )


def test_a_part_of_an_answer_is_continued(client: openai.OpenAI) -> None:
    said: Any = [{"role": "user", "content": STONE}, {"role": "assistant", "content": "e-n"}]
    chat = client.chat.completions.create(
        **GREEDY,
        messages=said,
        extra_body={
            "continue_final_message": True,
            "add_generation_prompt": False,
            "return_token_ids": True,
        },
    )
    shown: Any = {**GREEDY, "extra_body": {"enable_response_messages": True}}
    for status, is_continued in (("incomplete", True), ("completed", False)):
        said[-1]["status"] = status
        answer = client.responses.create(**shown, input=said)
        assert (seen(answer) == chat.prompt_token_ids) is is_continued  # type: ignore
    assert answer.output_text != chat.choices[0].message.content


def test_input_tokens_are_counted(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "f", "parameters": {}, "strict": False}
    for more in ({}, {"instructions": "Be brief."}, {"tools": [tool], "tool_choice": "required"}):
        fields: Any = {"model": MODEL, "input": STONE, **more}
        first = client.responses.create(**fields, max_output_tokens=1)
        count = client.responses.input_tokens.count(**fields)
        assert first.usage and count.input_tokens == first.usage.input_tokens
        fields["previous_response_id"] = first.id
        second = client.responses.create(**fields, max_output_tokens=1)
        count = client.responses.input_tokens.count(**fields)
        assert second.usage and count.input_tokens == second.usage.input_tokens


def test_a_response_in_the_background(client: openai.OpenAI) -> None:
    made = client.responses.create(**GREEDY, input=STONE, background=True)
    assert made.status == "queued" and made.background and made.output == []
    while made.status in ("queued", "in_progress"):
        made = client.responses.retrieve(made.id)
    assert made.status == "completed" and made.output_text == ENOTS
    assert made.usage and made.usage.output_tokens == 10
    [item] = client.responses.input_items.list(made.id).data
    assert item.type == "message"
    with pytest.raises(openai.BadRequestError, match="stream is only kept"):
        client.responses.retrieve(made.id, stream=True)
    # One that has ended stays as it is.
    assert client.responses.cancel(made.id).status == "completed"


def test_a_background_stream_outlives_its_client(slowly: openai.OpenAI) -> None:
    asked: Any = {**GREEDY, "input": STONE, "max_output_tokens": 40, "background": True}
    asked["extra_body"] = {"ignore_eos": True}
    with slowly.responses.create(**asked, stream=True) as stream:
        first = [event for _, event in zip(range(6), stream, strict=False)]
    kinds = [event.type.removeprefix("response.") for event in first]
    assert kinds[:4] == ["created", "queued", "in_progress", "output_item.added"]
    name = first[0].response.id  # type: ignore[union-attr]
    rest = list(slowly.responses.retrieve(name, stream=True, starting_after=5))
    events = [*first, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete"
    kept = slowly.responses.retrieve(name)
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert events[-1].response.output_text == text == kept.output_text != ""
    # From the beginning, and all of it at once.
    again = list(slowly.responses.retrieve(name, stream=True))
    assert [e.to_dict() for e in again] == [e.to_dict() for e in events]
    assert list(slowly.responses.retrieve(name, stream=True, starting_after=10**6)) == []


def test_a_background_response_is_cancelled(slow: Server, slowly: openai.OpenAI) -> None:
    made = slowly.responses.create(**GREEDY, input=STONE, background=True, stream=True, **LONG)
    name = next(iter(made)).response.id  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="the response is"):
        slowly.responses.create(**GREEDY, input="x", previous_response_id=name)
    done = slowly.responses.cancel(name)
    assert done.status == "cancelled" and done.usage is None
    slow.wait_until_idle()
    assert slowly.responses.retrieve(name).status == "cancelled"
    assert slowly.responses.cancel(name).status == "cancelled"
    assert [event.type for event in made][-1] != "response.completed"
    with pytest.raises(openai.BadRequestError, match="the response is cancelled"):
        slowly.responses.create(**GREEDY, input="x", previous_response_id=name)
    # One that is deleted ends too.
    made = slowly.responses.create(**GREEDY, input=STONE, background=True, **LONG)
    slowly.responses.delete(made.id)
    slow.wait_until_idle()
    with pytest.raises(openai.NotFoundError):
        slowly.responses.cancel(made.id)


def test_a_fault_of_the_request_is_no_error_of_the_server(client: openai.OpenAI) -> None:
    """As the log says, which is read after each test."""
    grammar = {"structured_outputs": {"regex": "(a?){1000}a{1000}"}}  # which leads nowhere
    asked: Any = {**GREEDY, "input": STONE, "max_output_tokens": 5, "background": True}
    made = client.responses.create(**asked, extra_body=grammar)
    while made.status in ("queued", "in_progress"):
        made = client.responses.retrieve(made.id)
    assert made.status == "failed" and made.error
    assert made.error.message.startswith("structured_outputs")


def test_a_synchronous_response_is_not_cancelled(client: openai.OpenAI) -> None:
    made = client.responses.create(**GREEDY, input=STONE)
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(made.id)


def test_the_oldest_turns_leave_a_prompt_that_is_too_long(client: openai.OpenAI) -> None:
    shown: Any = {**GREEDY, "extra_body": {"enable_response_messages": True}}
    system: Any = {"role": "system", "content": "Be brief."}
    turns: list[Any] = [{"role": "user", "content": f"{n} " + "x-" * 60} for n in range(9)]
    with pytest.raises(openai.BadRequestError, match="input") as refused:
        client.responses.create(**GREEDY, input=[system, *turns])
    assert refused.value.param == "input"
    cut = client.responses.create(**shown, input=[system, *turns], truncation="auto")
    fitting = []
    for first in range(1, 9):
        try:
            answer = client.responses.create(**shown, input=[system, *turns[first:]])
        except openai.BadRequestError:
            continue
        fitting.append(answer)
    assert 0 < len(fitting) < 8 and seen(cut) == seen(fitting[0])
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**GREEDY, input="x-" * 600, truncation="auto")


def test_custom_tools_take_a_text(client: openai.OpenAI) -> None:
    tool: Any = {"type": "custom", "name": "shout", "description": "Says it loudly."}
    asked: Any = {**GREEDY, "input": "Yes?", "tools": [tool], "max_output_tokens": 300}
    asked["tool_choice"] = {"type": "custom", "name": "shout"}
    whole = client.responses.create(**asked)
    [item] = whole.output
    assert item.type == "custom_tool_call" and item.name == "shout" and item.call_id
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert "response.custom_tool_call_input.delta" in kinds
    [done] = [e for e in events if e.type == "response.custom_tool_call_input.done"]
    assert done.input == item.input
    turn: Any = [{"type": "custom_tool_call_output", "call_id": item.call_id, "output": "ok"}]
    answer = client.responses.create(
        **GREEDY, input=turn, previous_response_id=whole.id, max_output_tokens=4
    )
    assert answer.output[0].type == "message"


def test_functions_of_a_namespace(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    function: Any = {"type": "function", "name": "plan", "parameters": schema}
    tools: Any = [
        {"type": "web_search"},
        {"type": "namespace", "name": "mcp", "description": "d", "tools": [function]},
    ]
    asked: Any = {**GREEDY, "input": "Yes?", "tools": tools, "max_output_tokens": 300}
    whole = client.responses.create(**asked, tool_choice="required", parallel_tool_calls=False)
    [item] = whole.output
    assert item.type == "function_call" and (item.namespace, item.name) == ("mcp", "plan")
    turn: Any = [{"type": "function_call_output", "call_id": item.call_id, "output": "ok"}]
    more: Any = {"max_output_tokens": 4, "extra_body": {"enable_response_messages": True}}
    answer = client.responses.create(**GREEDY, input=turn, previous_response_id=whole.id, **more)
    flat = {"type": "function_call", "name": "mcp__plan", "call_id": item.call_id}
    said: Any = [
        {"role": "user", "content": "Yes?"},
        {**flat, "arguments": item.arguments},
        *turn,
    ]
    assert seen(answer) == seen(client.responses.create(**GREEDY, input=said, **more))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": 7}, "previous_response_id"),
    ({"store": "yes"}, "store"),
    ({"background": 1}, "background"),
    ({"background": True, "store": False}, "background"),
    ({"conversation": 7}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"previous_input_messages": [{}]}, "previous_input_messages"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"truncation": "middle"}, "truncation"),
    ({"service_tier": "best"}, "service_tier"),
    ({"text": {"verbosity": "silent"}}, "text"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata"),
    ({"metadata": {"a" * 65: "x"}}, "metadata"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"tools": [{"type": "unheard_of", "container": "a"}]}, "tools"),
    ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "custom"}]}]}, "tools"),
    ({"tools": [{"type": "namespace", "tools": []}]}, "tools"),
    ({"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"input": [{"type": "compaction", "encrypted_content": "a"}]}, "input"),
    ({"input": [{"type": "custom_tool_call", "name": "a"}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "msg_none"}]}, "input"),
    ({"input": [{"type": "item_reference"}]}, "input"),
    ({"enable_response_messages": "all"}, "enable_response_messages"),
]


@pytest.mark.parametrize(("fields", "name"), BAD, ids=str)
def test_a_bad_field_is_named(server: Server, fields: dict[str, Any], name: str) -> None:
    answer = server.request(PATH, {"input": "a", "max_output_tokens": 1, **fields})
    assert answer.status == 400 and answer.error["param"] == name, answer.body


@pytest.mark.parametrize(
    ("method", "path", "status", "name"),
    [
        *((m, PATH + "/resp_0", 404, "response_id") for m in ("GET", "DELETE")),
        ("POST", PATH + "/resp_0/cancel", 404, "response_id"),
        ("GET", PATH + "/resp_0/input_items", 404, "response_id"),
        ("GET", PATH + "/%2e%2e%00" + "x" * 2000, 404, "response_id"),
        ("GET", PATH + "/KEPT?stream=maybe", 400, "stream"),
        ("GET", PATH + "/KEPT?stream=true", 400, "stream"),
        ("GET", PATH + "/KEPT?starting_after=-1", 400, "starting_after"),
        *(("GET", PATH + f"/KEPT/input_items?limit={n}", 400, "limit") for n in ("0", "101", "x")),
        ("GET", PATH + "/KEPT/input_items?order=up", 400, "order"),
        ("GET", PATH + "/KEPT/input_items?after=msg_0", 400, "after"),
    ],
)
def test_a_bad_path_is_refused(
    server: Server, method: str, path: str, status: int, name: str
) -> None:
    made = server.request(PATH, {"input": "a", "max_output_tokens": 1}).json()["id"]
    answer = server.request(path.replace("KEPT", made), method=method)
    assert (answer.status, answer.error["param"]) == (status, name)


def test_a_response_belongs_to_its_key(narrow: Server) -> None:
    body = {"input": "a", "max_output_tokens": 1}
    made = narrow.request(PATH, body).json()["id"]
    other = {"authorization": f"Bearer {KEYS[1]}"}
    assert narrow.request(f"{PATH}/{made}").status == 200
    assert narrow.request(f"{PATH}/{made}", headers=other).status == 404
    assert narrow.request(f"{PATH}/{made}", headers=other, method="DELETE").status == 404
    answer = narrow.request(PATH, {**body, "previous_response_id": made}, other)
    assert (answer.status, answer.error["param"]) == (404, "previous_response_id")
    assert narrow.request(f"{PATH}/{made}").status == 200


def test_a_full_queue_refuses_the_background_too(narrow: Server) -> None:
    body = {"input": "a", "max_output_tokens": 200, "ignore_eos": True, "background": True}
    answers = [narrow.request(PATH, body) for _ in range(5)]
    assert [answer.status for answer in answers] == [200, 200, 200, 429, 429]
    for answer in answers[:3]:
        assert narrow.request(f"{PATH}/{answer.json()['id']}", method="DELETE").status == 200


def turn(name: str, parent: Turn | None = None, size: int = 100) -> Turn:
    answer = {"output": [{"type": "message", "role": "assistant", "content": "x" * size}]}
    return Turn(name, None, parent, [{"id": f"i-{name}"}], json.dumps(answer).encode())


def test_the_store_is_bounded_by_number_bytes_and_age() -> None:
    store = ResponseStore(3, 10**9, 1e9)
    turns = [turn(str(n)) for n in range(5)]
    turns[1].cancel = lambda: None  # the work on it goes on, so that it stays
    for one_turn in turns:
        store.add(one_turn)
    assert [name for name in "01234" if has(store, name)] == ["1", "3", "4"]
    assert store.num_bytes == sum(turns[n].num_bytes for n in (1, 3, 4))
    store = ResponseStore(100, 5 * turn("a", size=1000).num_bytes, 1e9)
    for n in range(9):
        store.add(turn(str(n), size=1000))
    assert [n for n in range(9) if has(store, str(n))] == [4, 5, 6, 7, 8]
    old = turn("old")
    old.since -= 100
    store = ResponseStore(100, 10**9, 50)
    store.add(old)
    assert not has(store, "old") and store.num_bytes == 0


def test_a_turn_that_is_too_large_leaves_alone() -> None:
    store = ResponseStore(100, 5 * turn("a", size=1000).num_bytes, 1e9)
    store.add(turn("small"))
    store.add(turn("large", size=10**6))
    assert has(store, "small") and not has(store, "large")
    running = turn("running")
    running.events, running.cancel = [], lambda: None
    store.add(running)
    running.append([b"x" * 10**6])
    store.resize(running)
    assert running.events is None and has(store, "small") and has(store, "running")
    running.response = turn("large", size=10**6).response
    store.resize(running)
    assert has(store, "running")  # which is still drawn
    running.cancel = None
    store.resize(running)
    assert has(store, "small") and len(store) == 1
    assert store.num_bytes == turn("small").num_bytes


def has(store: ResponseStore, name: str) -> bool:
    try:
        return store.get(name, None).id == name
    except ApiError:
        return False


def test_what_others_continue_still_counts() -> None:
    store = ResponseStore(100, 10**9, 1e9)
    first = turn("first")
    second, third = turn("second", first), turn("third", first)
    for one_turn in (first, second, third):
        store.add(one_turn)
    total = store.num_bytes
    assert total > 3 * OVERHEAD_BYTES
    store.remove(first)
    assert store.num_bytes == total and not store.find_items(["i-first"], None, 10**9)
    store.remove(second)
    assert store.num_bytes == first.num_bytes + third.num_bytes
    assert third.lineage() == [first, third]
    store.remove(third)
    assert store.num_bytes == 0 and len(store) == 0


def test_a_parent_that_leaves_before_it_is_continued_counts_again() -> None:
    store = ResponseStore(100, 10**9, 1e9)
    first = turn("first")
    second = turn("second", first)
    store.add(first)
    store.add(second)
    store.remove(first)
    store.remove(second)  # while an answer that continues it is drawn
    third = turn("third", second)
    store.add(third)
    assert store.num_bytes == sum(kept.num_bytes for kept in (first, second, third))
    store.remove(third)
    assert store.num_bytes == 0


def test_ids_of_items_are_those_of_one_client() -> None:
    store = ResponseStore(100, 10**9, 1e9)
    mine, theirs = turn("a"), turn("a")
    mine.owner, theirs.owner, theirs.id = "me", "them", "b"
    store.add(mine)
    store.add(theirs)
    assert list(store.find_items(["i-a"], "me", 10**9)) == ["i-a"]
    store.remove(theirs)
    assert list(store.find_items(["i-a"], "me", 10**9)) == ["i-a"]
    twice = [InputItem(id="x", content="1"), InputItem(id="x", content="2")]
    first, second = shown_items(twice)
    assert first["id"] == "x" != second["id"]


def test_a_conversation_is_bounded_by_what_is_read() -> None:
    kept = turn("a", size=1000)
    answer = json.loads(kept.response)
    kept.response = json.dumps({**answer, "tools": ["x" * 10**6]}).encode()
    assert 1000 < kept.num_item_bytes < 1200
    store = ResponseStore(100, 10**9, 1e9)
    store.add(kept)
    assert store.find_items(["i-a"], None, 1200)
    with pytest.raises(InvalidRequest, match="more than 1000 bytes"):
        store.find_items(["i-a"], None, 1000)


def test_names_of_functions_of_groups() -> None:
    function = ResponseTool(type="function", name="find")
    crm, shop = (ResponseTool(type="namespace", name=n, tools=[function]) for n in ("crm", "shop"))
    call = InputItem(
        type="function_call", namespace="crm", name="find", call_id="c", arguments="{}"
    )
    body = ResponsesRequest(input=[call], tools=[crm], tool_choice=ToolChoice(name="find"))
    chat = as_chat(body, [call])
    [made] = chat.messages[0].tool_calls or []
    assert made.function.name == "crm__find"
    assert isinstance(chat.tool_choice, NamedTool)
    assert chat.tool_choice.function.name == "crm__find"
    body.tools = [crm, shop]
    with pytest.raises(InvalidRequest, match="crm__find, shop__find"):
        as_chat(body, [call])
    body.tools = [crm, function]
    chat = as_chat(body, [call])
    assert isinstance(chat.tool_choice, NamedTool) and chat.tool_choice.function.name == "find"
