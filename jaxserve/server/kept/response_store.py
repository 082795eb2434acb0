"""ResponseStore: responses in memory, so that later ones can continue them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.server.kept.shares import Shares
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.response_items import InputItem

# Bytes of a kept response besides its texts: the objects that hold them.
OVERHEAD_BYTES = 2048
_items = msgspec.json.Decoder(list[InputItem])


class _Output(msgspec.Struct):
    """The part of a response that a conversation continues from."""

    output: list[InputItem]


class _OutputText(msgspec.Struct):
    """The same as it was written."""

    output: msgspec.Raw


_answer = msgspec.json.Decoder(_Output)
_answer_text = msgspec.json.Decoder(_OutputText)


class Turn:
    """A response and the input that it answers; what came before is its parent.

    Args:
        response_id: of the response.
        owner: the key of its client; None where the server requires none.
        parent: the turn that it continues.
        items: of its input, as they are listed.
        response: the answer as JSON.

    Attributes:
        status: of the response.
        events: its stream so far, where it is drawn in the background and streamed; else None.
        cancel: ends the work on it; None where it has ended.
        task: the work in the background; None where its client waited.
        conversation: id of the conversation that it is part of; None for none.
        item_ids: of its input and of its answer.
        since: when it was made, on the monotonic clock.
        holders: the store, if it is there, and the turns that continue it.
    """

    def __init__(
        self,
        response_id: str,
        owner: str | None,
        parent: Turn | None,
        items: list[dict[str, Any]],
        response: bytes,
    ) -> None:
        self.id = response_id
        self.owner = owner
        self.parent = parent
        self.input = msgspec.json.encode(items)
        self.response = response
        self.status = "completed"
        self.events: list[bytes] | None = None
        self.conversation: str | None = None
        self.cancel: Callable[[], None] | None = None
        self.task: asyncio.Task[None] | None = None
        self.item_ids: list[str] = [item["id"] for item in items]
        self.since = time.monotonic()
        self.holders = 0
        self.counted = 0
        self._event_bytes = 0
        self._news = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, without what came before."""
        return len(self.input) + len(self.response) + self._event_bytes + OVERHEAD_BYTES

    @property
    def num_item_bytes(self) -> int:
        """Size of the items of the input and of the answer, which those that continue it read."""
        return len(self.input) + len(_answer_text.decode(self.response).output)

    @property
    def is_running(self) -> bool:
        """Return whether the answer is still to come."""
        return self.cancel is not None

    def append(self, events: list[bytes]) -> None:
        """Add events of the stream."""
        if self.events is not None:
            self.events += events
            self._event_bytes += sum(map(len, events))
        self.notify()

    def drop_events(self) -> None:
        """Keep no events of the stream, neither those so far nor later ones."""
        self.events, self._event_bytes = None, 0

    def notify(self) -> None:
        """Wake those that wait for a change."""
        self._news.set()
        self._news = asyncio.Event()

    async def wait(self) -> None:
        """Wait for events, or for the end."""
        await self._news.wait()

    def lineage(self) -> list[Turn]:
        """Return the turns of the conversation, the first of them first."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def input_items(self) -> list[dict[str, Any]]:
        """Return the items of the input, as they are listed."""
        return msgspec.json.decode(self.input)

    def own_items(self) -> Iterator[InputItem]:
        """Yield the items of the input and of the answer."""
        yield from _items.decode(self.input)
        yield from _answer.decode(self.response).output


class ResponseStore:
    """Responses by id, bounded by number, bytes and age; see `Shares` for the next to leave.

    One that is still drawn stays. A turn that has left, and that later ones continue, still counts:
    it is their beginning. One that alone is larger than all that may be kept leaves alone, as soon
    as it has ended.

    Args:
        most: responses; 0 keeps none.
        most_bytes: of all that is kept.
        seconds: age of a response that leaves.
    """

    def __init__(self, most: int, most_bytes: int, seconds: float) -> None:
        self.most = most
        self._most_bytes = most_bytes
        self._turns: Shares[Turn] = Shares(most, most_bytes, seconds)
        self._by_item: dict[tuple[str | None, str], Turn] = {}

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def num_bytes(self) -> int:
        """Memory of all that is kept."""
        return self._turns.num_bytes

    def add(self, turn: Turn) -> None:
        """Keep a turn, unless it alone is larger than all that may be kept."""
        self._turns.put(turn.id, turn)
        last: Turn | None = turn
        while last is not None:
            last.holders += 1
            if last.holders > 1:
                break
            self._count(last)  # a parent that has left meanwhile counts again
            last = last.parent
        self.resize(turn)

    def resize(self, turn: Turn) -> None:
        """Count a turn anew, which has changed."""
        if turn.num_bytes > self._most_bytes:
            turn.drop_events()
        if turn.holders:
            self._count(turn)
        if self._turns.get(turn.owner, turn.id) is turn:
            if turn.num_bytes > self._most_bytes and not turn.is_running:
                self._forget(turn)
            else:
                self._by_item.update(dict.fromkeys(_keys(turn), turn))
        self._trim()

    def _count(self, turn: Turn) -> None:
        """Count what a turn takes: nothing where it cannot stay, so that no other leaves for it."""
        size = turn.num_bytes if turn.num_bytes <= self._most_bytes else 0
        self._turns.count(turn.owner, size - turn.counted)
        turn.counted = size

    def get(self, response_id: str, owner: str | None, parameter: str = "response_id") -> Turn:
        """Return the turn of an id.

        Raises:
            ApiError: 404, there is none that this client may see.
        """
        self._trim()
        turn = self._turns.get(owner, response_id)
        if turn is None:
            message = f"Response with id {response_id[:60]!r} not found."
            if not self.most:
                message += " This server keeps none: see --max-stored-responses."
            raise ApiError(404, message, parameter, "not_found")
        return turn

    def remove(self, turn: Turn) -> None:
        """Forget a turn, and end the work on it."""
        if self._turns.get(turn.owner, turn.id) is turn:
            self._forget(turn)
        if turn.cancel is not None:
            turn.cancel()

    def find_items(
        self, item_ids: Iterable[str], owner: str | None, most: int
    ) -> dict[str, InputItem]:
        """Return those items, by id, that are kept and that this client may see.

        Raises:
            InvalidRequest: the responses that hold them take more than `most` bytes.
        """
        found = [self._by_item.get((owner, name)) for name in item_ids]
        turns = {turn.id: turn for turn in found if turn is not None}
        if sum(turn.num_item_bytes for turn in turns.values()) > most:
            raise InvalidRequest(
                f"input refers to items of responses that take more than {most} bytes", "input"
            )
        items = (item for turn in turns.values() for item in turn.own_items())
        return {item.id: item for item in items if item.id is not None}

    def _forget(self, turn: Turn) -> None:
        self._turns.pop(turn.owner, turn.id)
        for key in _keys(turn):
            if self._by_item.get(key) is turn:
                del self._by_item[key]
        last: Turn | None = turn
        while last is not None:
            last.holders -= 1
            if last.holders:
                return
            self._turns.count(last.owner, -last.counted)
            last.counted = 0
            last = last.parent

    def _trim(self) -> None:
        for turn in self._turns.leaving():
            self._forget(turn)


def _keys(turn: Turn) -> list[tuple[str | None, str]]:
    """Return the names of a turn's items. Clients choose ids, so each has names of its own."""
    return [(turn.owner, name) for name in turn.item_ids]
