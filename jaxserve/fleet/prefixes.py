"""Digests of prefixes of prompts, by which a router finds a replica that has computed them."""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from hashlib import blake2b
from itertools import islice
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# A digest covers whole blocks. A token is about four bytes, both as an id and as text, so that a
# block is about 256 tokens. Shorter prompts are not routed by their prefix.
BLOCK_BYTES = 1024
TOKEN_BYTES = 4
# Most digests in a report (64 KiB, two million tokens of cache). Older ones are omitted.
MOST_DIGESTS = 8192
_DIGEST_BYTES = 8
_KEY_BYTES = 64
_FIELDS = ("model", "cache_salt", "tools", "system", "instructions")
_PROMPTS = ("messages", "prompt", "input")


def digests_of(body: bytes, secret: bytes) -> list[int]:
    """Return the digests of all prefixes of a request's prompt that are whole blocks.

    Args:
        body: JSON of a request to an endpoint that generates tokens. Other bodies have no digests.
        secret: key of the digests, so that they cannot be used to guess prompts.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return []
    if not isinstance(fields, dict):
        return []
    prompt = next((fields[name] for name in _PROMPTS if fields.get(name)), None)
    if prompt is None:
        return []
    before = [fields[name] for name in _FIELDS if fields.get(name)]
    return chained_digests(_plain(before) + _plain(prompt), secret)


def chained_digests(data: bytes, secret: bytes) -> list[int]:
    """Return the digests of all prefixes of `data` that are whole blocks."""
    state = blake2b(key=secret[:_KEY_BYTES], digest_size=_DIGEST_BYTES, person=b"jaxserve route")
    digests = []
    for start in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
        state.update(data[start : start + BLOCK_BYTES])
        digests.append(int.from_bytes(state.copy().digest(), "little"))
    return digests


def _plain(prompt: Any) -> bytes:
    """Return a prompt as bytes, such that prompts with equal prefixes have equal prefixes there."""
    if isinstance(prompt, str):
        return prompt.encode(errors="replace")
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        try:
            return array("i", prompt).tobytes()
        except OverflowError:
            return b""
    if isinstance(prompt, list):
        return b"".join(_plain(part) for part in prompt)
    return json.dumps(prompt).encode()


class PrefixRecord:
    """The prefixes that a replica has served and whose pages its cache still has.

    Beyond the size of the cache it drops the least recently used prefixes, as the cache does.

    Args:
        secret: secret of the fleet, the key of digests.
        num_tokens: number of tokens in the pages of the cache.
    """

    def __init__(self, secret: bytes, num_tokens: int) -> None:
        self._secret = secret
        self._most = max(1, num_tokens * TOKEN_BYTES // BLOCK_BYTES)
        self._used: OrderedDict[int, None] = OrderedDict()

    def add(self, body: bytes) -> None:
        """Record the digests of the prompt in the body of a request."""
        self.add_digests(digests_of(body, self._secret))

    def add_digests(self, digests: list[int]) -> None:
        # Long prefixes are dropped first, like their pages.
        for digest in reversed(digests):
            self._used[digest] = None
            self._used.move_to_end(digest)
        while len(self._used) > self._most:
            self._used.popitem(last=False)

    def report(self) -> bytes:
        """Return the `MOST_DIGESTS` most recently used digests, 8 bytes each."""
        return array("Q", islice(reversed(self._used), MOST_DIGESTS)).tobytes()


def reported(report: bytes) -> frozenset[int]:
    """Return the digests in the bytes of a report."""
    return frozenset(array("Q", report))


class Recorder:
    """ASGI middleware that records the prompts of all requests in a `PrefixRecord`."""

    def __init__(self, app: ASGIApp, record: PrefixRecord) -> None:
        self._app = app
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return

        async def record(message: Message) -> None:
            # Refused requests have not been computed.
            if message["type"] == "http.response.start" and message["status"] == 200:
                self._record.add(scope.get("jaxserve.body", b""))
            await send(message)

        await self._app(scope, receive, record)
