"""Prefixes of prompts as digests, by which a router finds the replica that has computed them."""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from hashlib import blake2b
from itertools import islice
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# A digest stands for a prefix of whole blocks. A token id counts four bytes, and text has about
# four a token, so that a block is about 256 tokens: shorter prompts are not worth a detour.
BLOCK_BYTES = 1024
TOKEN_BYTES = 4
# Digests of a report, 64 KiB: a cache of two million tokens. Older ones are left out.
MOST_DIGESTS = 8192
_DIGEST_BYTES = 8
_KEY_BYTES = 64
_FIELDS = ("model", "cache_salt", "tools", "system", "instructions")
_PROMPTS = ("messages", "prompt", "input")


def digests_of(body: bytes, secret: bytes) -> list[int]:
    """Return a digest for every whole block of a request's prompt, each over all before it too.

    Args:
        body: JSON of a request to any endpoint that draws tokens; of anything else there are none.
        secret: keeps others from guessing prompts by their digests.
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
    """Return digests of all prefixes of some bytes that are whole blocks."""
    state = blake2b(key=secret[:_KEY_BYTES], digest_size=_DIGEST_BYTES, person=b"jaxserve route")
    found = []
    for start in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
        state.update(data[start : start + BLOCK_BYTES])
        found.append(int.from_bytes(state.copy().digest(), "little"))
    return found


def _plain(prompt: Any) -> bytes:
    """Return a prompt as bytes that begin alike where prompts do."""
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
    """The prefixes that a replica has served, as far as its cache holds them.

    It forgets as the cache does, what was used longest ago first, when it stands for more tokens
    than there are pages for.

    Args:
        secret: of the fleet.
        num_tokens: that the cache has pages for.
    """

    def __init__(self, secret: bytes, num_tokens: int) -> None:
        self._secret = secret
        self._most = max(1, num_tokens * TOKEN_BYTES // BLOCK_BYTES)
        self._used: OrderedDict[int, None] = OrderedDict()

    def add(self, body: bytes) -> None:
        """Take in the prompt of a request that is being served."""
        self.add_digests(digests_of(body, self._secret))

    def add_digests(self, digests: list[int]) -> None:
        # The longest prefixes go first, as their pages do.
        for digest in reversed(digests):
            self._used[digest] = None
            self._used.move_to_end(digest)
        while len(self._used) > self._most:
            self._used.popitem(last=False)

    def report(self) -> bytes:
        """Return the digests used last, of 8 bytes each, at most `MOST_DIGESTS`."""
        return array("Q", islice(reversed(self._used), MOST_DIGESTS)).tobytes()


def reported(report: bytes) -> frozenset[int]:
    """Return the digests of a report."""
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
            # Refused requests have computed nothing.
            if message["type"] == "http.response.start" and message["status"] == 200:
                self._record.add(scope.get("jaxserve.body", b""))
            await send(message)

        await self._app(scope, receive, record)
