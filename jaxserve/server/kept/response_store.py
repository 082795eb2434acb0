"""ResponseStore: responses in memory, so that later requests can continue them."""

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

# Estimated bytes of the objects of a response, in addition to its text.
OVERHEAD_BYTES = 2048
_items = msgspec.json.Decoder(list[InputItem])


class _Output(msgspec.Struct):
    """Output items of a response object, decoded from the object's JSON."""

    output: list[InputItem]


class _OutputText(msgspec.Struct):
    """Output items of a response object, as undecoded JSON."""

    output: msgspec.Raw


_answer = msgspec.json.Decoder(_Output)
_answer_text = msgspec.json.Decoder(_OutputText)


class Turn:
    """A response of the API in memory, with the input items that it answers.

    Args:
        response_id: id of the response.
        owner: digest of the client's API key, or None.
        parent: turn of the previous response that this response continues, or None.
        items: input items as JSON objects with ids.
        response: the response object as JSON.
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
        # Events of its stream so far, if it is generated in the background and streamed, otherwise
        # None.
        self.events: list[bytes] | None = None
        self.conversation: str | None = None
        # Function that cancels the generation, None if it has ended.
        self.cancel: Callable[[], None] | None = None
        # Background task, None if the client waited for the response.
        self.task: asyncio.Task[None] | None = None
        # Ids of its input and output items.
        self.item_ids: list[str] = [item["id"] for item in items]
        self.since = time.monotonic()  # time of creation on the monotonic clock
        self.holders = 0  # number of references: the store, and the turns that continue it
        self.counted = 0  # bytes that the store has counted for it
        self._event_bytes = 0
        self._news = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        """Estimated memory of a stored response with its input, in bytes, without its parents."""
        return len(self.input) + len(self.response) + self._event_bytes + OVERHEAD_BYTES

    @property
    def num_item_bytes(self) -> int:
        """Bytes of JSON of the response's input and output items, for requests that continue it."""
        return len(self.input) + len(_answer_text.decode(self.response).output)

    @property
    def is_running(self) -> bool:
        """Whether the response is still being generated."""
        return self.cancel is not None

    def append(self, events: list[bytes]) -> None:
        """Append events to the stored stream of the response, and wake the readers in `wait`.

        The events are dropped if the response stores no stream.
        """
        if self.events is not None:
            self.events += events
            self._event_bytes += sum(map(len, events))
        self.notify()

    def drop_events(self) -> None:
        """Discard the stored events of the response's stream. Later events are not stored."""
        self.events, self._event_bytes = None, 0

    def notify(self) -> None:
        """Wake all tasks that wait in `wait` for events or the end of the response."""
        self._news.set()
        self._news = asyncio.Event()

    async def wait(self) -> None:
        """Wait for new events or the end of the response."""
        await self._news.wait()

    def lineage(self) -> list[Turn]:
        """Return the responses that this one continues, the first one first, and finally itself."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def input_items(self) -> list[dict[str, Any]]:
        """Return the input items that the response answers, as JSON objects with ids."""
        return msgspec.json.decode(self.input)

    def own_items(self) -> Iterator[InputItem]:
        """Yield the response's input items, then its output items, without items of its parents."""
        yield from _items.decode(self.input)
        yield from _answer.decode(self.response).output


class ResponseStore(Shares[Turn]):
    """Responses in memory by owner and id, limited in number, bytes and age.

    `Shares` defines the order of eviction. A running response is not evicted. The bytes of an
    evicted turn count while stored turns continue it. A response that is larger than the limit on
    bytes is removed when it has ended, and does not evict others.

    Args:
        most: maximum number of responses, 0 to disable the store.
        most_bytes: maximum estimated memory of all responses in bytes.
        seconds: age after which a response is evicted.
    """

    def __init__(self, most: int, most_bytes: int, seconds: float) -> None:
        super().__init__(most, most_bytes, seconds)
        self._by_item: dict[tuple[str | None, str], Turn] = {}

    def add(self, turn: Turn) -> None:
        """Store a new response (a turn), and evict others beyond the limits of the store.

        An ended turn that is larger than the limit on bytes is not stored.
        """
        self.put(turn.id, turn)
        last: Turn | None = turn
        while last is not None:
            last.holders += 1
            if last.holders > 1:
                break
            self._count(last)  # a parent that was evicted counts again
            last = last.parent
        self.resize(turn)

    def resize(self, turn: Turn) -> None:
        """Update the counted bytes of a changed response (a turn), and evict turns if necessary.

        A turn above the limit on bytes loses its events, and is removed if it is still too large
        and has ended.
        """
        if turn.num_bytes > self.most_bytes:
            turn.drop_events()
        if turn.holders:
            self._count(turn)
        if self.entry(turn.owner, turn.id) is turn:
            if turn.num_bytes > self.most_bytes and not turn.is_running:
                self._forget(turn)
            else:
                self._by_item.update(dict.fromkeys(_keys(turn), turn))
        self._trim()

    def _count(self, turn: Turn) -> None:
        # A turn that is too large to store counts 0, so that it evicts no other.
        size = turn.num_bytes if turn.num_bytes <= self.most_bytes else 0
        self.count(turn.owner, size - turn.counted)
        turn.counted = size

    def get(self, response_id: str, owner: str | None, parameter: str = "response_id") -> Turn:
        """Return the stored response (a turn) with an id that belongs to an owner.

        Args:
            owner: digest of the client's API key, or None.
            parameter: name of the request's field or argument with the id, for the error.

        Raises:
            ApiError: 404, this client has no such response.
        """
        self._trim()
        turn = self.entry(owner, response_id)
        if turn is None:
            message = f"Response with id {response_id[:60]!r} not found."
            if not self.most:
                message += " This server keeps none: see --max-stored-responses."
            raise ApiError(404, message, parameter, "not_found")
        return turn

    def remove(self, turn: Turn) -> None:
        """Remove a response (a turn) from the store, and cancel its generation if it is running."""
        if self.entry(turn.owner, turn.id) is turn:
            self._forget(turn)
        if turn.cancel is not None:
            turn.cancel()

    def find_items(
        self, item_ids: Iterable[str], owner: str | None, most: int
    ) -> dict[str, InputItem]:
        """Return input and output items of an owner's stored responses, by item id.

        Args:
            item_ids: ids of the requested items.
            owner: digest of the client's API key, or None.
            most: maximum number of bytes of the items of the responses.

        Returns:
            All items of the responses that contain a requested item. Unknown ids are absent.

        Raises:
            InvalidRequest: the responses have more than `most` bytes of items.
        """
        stored = [self._by_item.get((owner, name)) for name in item_ids]
        turns = {turn.id: turn for turn in stored if turn is not None}
        if sum(turn.num_item_bytes for turn in turns.values()) > most:
            raise InvalidRequest(
                f"input refers to items of responses that take more than {most} bytes", "input"
            )
        items = (item for turn in turns.values() for item in turn.own_items())
        return {item.id: item for item in items if item.id is not None}

    def _forget(self, turn: Turn) -> None:
        self.pop(turn.owner, turn.id)
        for key in _keys(turn):
            if self._by_item.get(key) is turn:
                del self._by_item[key]
        last: Turn | None = turn
        while last is not None:
            last.holders -= 1
            if last.holders:
                return
            self.count(last.owner, -last.counted)
            last.counted = 0
            last = last.parent

    def _trim(self) -> None:
        for turn in self.leaving():
            self._forget(turn)


def _keys(turn: Turn) -> list[tuple[str | None, str]]:
    # Clients choose item ids, so each owner has a namespace.
    return [(turn.owner, name) for name in turn.item_ids]
