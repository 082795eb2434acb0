"""Conversations: made, changed, listed, bounded, and gone on with by responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.server.kept.conversation_store import (
    MAX_ITEMS,
    OVERHEAD_BYTES,
    Conversation,
    ConversationStore,
)
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.response_items import InputItem
from tests.support.live_server import Server

STONE, ENOTS = "Reverse: s-t-o-n-e", "e-n-o-t-s"
GREEDY: Any = {"model": "demo_model", "temperature": 0}
SHOWN: Any = {**GREEDY, "extra_body": {"enable_response_messages": True}}
USER: Any = {"type": "message", "role": "user", "content": "Hi"}


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def texts(client: openai.OpenAI, conversation: str) -> list[str]:
    items: Any = client.conversations.items.list(conversation, order="asc")
    return [part.text for item in items for part in item.content]


def seen(answer: Any) -> list[int]:
    return answer.input_messages[0]["tokens"]


def test_responses_go_on_with_a_conversation_as_if_all_were_sent(client: openai.OpenAI) -> None:
    made = client.conversations.create(items=[USER], metadata={"topic": "stones"})
    assert made.id.startswith("conv_") and made.metadata == {"topic": "stones"}
    first = client.responses.create(**GREEDY, input=STONE, conversation=made.id)
    assert first.conversation and first.conversation.id == made.id
    with client.responses.stream(**SHOWN, input="a-b", conversation={"id": made.id}) as stream:
        second = stream.get_final_response()
    said: Any = [USER, {"role": "user", "content": STONE}]
    said += [{"role": "assistant", "content": first.output_text}]
    whole = client.responses.create(**SHOWN, input=[*said, {"role": "user", "content": "a-b"}])
    assert seen(second) == seen(whole) and second.output_text == whole.output_text
    assert texts(client, made.id) == ["Hi", STONE, first.output_text, "a-b", second.output_text]
    count = client.responses.input_tokens.count(model="demo_model", input="c", conversation=made.id)
    third = client.responses.create(
        **GREEDY, input="c", conversation=made.id, store=False, max_output_tokens=1
    )
    assert third.usage and third.usage.input_tokens == count.input_tokens
    assert len(texts(client, made.id)) == 7  # includes items that are not stored as a response
    with pytest.raises(openai.BadRequestError, match="part of a conversation"):
        client.responses.create(**GREEDY, input="c", previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        client.responses.create(
            **GREEDY, input="c", previous_response_id=whole.id, conversation=made.id
        )


def test_items_and_metadata_change(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    call: Any = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result: Any = {"type": "function_call_output", "call_id": "1", "output": "x"}
    items: Any = client.conversations.items
    added = items.create(made.id, items=[USER, USER | {"id": "mine"}, call, result]).data
    assert len({item.id for item in added}) == 4 and added[1].id == "mine"
    again = items.create(made.id, items=[USER | {"id": "mine"}]).data
    assert again[0].id != "mine"
    assert [item.id for item in items.list(made.id, limit=2)] == [
        item.id for item in reversed([*added, *again])
    ]
    assert items.retrieve("mine", conversation_id=made.id).role == "user"
    assert items.delete("mine", conversation_id=made.id).id == made.id
    with pytest.raises(openai.NotFoundError, match="Item with id 'mine'"):
        items.retrieve("mine", conversation_id=made.id)
    client.conversations.update(made.id, metadata={"a": "b"})
    assert client.conversations.retrieve(made.id).metadata == {"a": "b"}
    assert client.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError, match="Conversation with id"):
        client.responses.create(**GREEDY, input="c", conversation=made.id)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([USER] * 21, "at most 20 items"),
        ([], "items is empty"),
        ([{"type": "unheard_of"}], "items of type 'unheard_of' are not supported"),
        ([{"type": "function_call"}], "items: a function_call needs name and call_id"),
    ],
)
def test_bad_items_change_nothing(client: openai.OpenAI, items: Any, message: str) -> None:
    made = client.conversations.create(items=[USER])
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.conversations.items.create(made.id, items=items)
    assert caught.value.param == "items"
    assert texts(client, made.id) == ["Hi"]


def held(owner: str | None = None, size: int = 10) -> Conversation:
    made = Conversation(owner, {})
    made.add(made.show_new([InputItem(content="x" * size)]))
    return made


def test_the_store_is_bounded() -> None:
    store = ConversationStore(2, 100_000, 1000)
    first, second, third = held("a"), held("a"), held("a")
    for made in (first, second):
        store.keep(made)
    store.extend(first, first.show_new([InputItem(content="y")]))  # the newest now
    store.keep(third)
    assert store.get(first.shown.id, "a") is first and len(store) == 2
    with pytest.raises(ApiError):
        store.get(second.shown.id, "a")
    with pytest.raises(ApiError):
        store.get(first.shown.id, "b")
    store.extend(second, second.show_new([InputItem(content="y")]))
    assert len(store) == 2 and store.num_bytes == first.num_bytes + third.num_bytes
    large = held("a", 100_000 - OVERHEAD_BYTES)
    store.keep(large)
    assert len(store) == 2  # alone larger than all that may be kept
    store.keep(held("a", 98_000))
    assert len(store) == 1 and store.num_bytes <= 100_000
    with pytest.raises(InvalidRequest, match="at most"):
        first.show_new([InputItem(content="x")] * MAX_ITEMS)
    old = ConversationStore(2, 100_000, 0)
    old.keep(first)
    with pytest.raises(ApiError):
        old.get(first.shown.id, "a")
    with pytest.raises(ApiError, match="keeps no conversations"):
        ConversationStore(0, 1000, 1).keep(first)
