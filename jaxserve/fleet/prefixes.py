"""Digests of prefixes of prompts, by which PrefixPolicy finds a replica that has computed them."""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Any, Generic, TypeVar

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
    """Return the digests of the prompt in a request's body, one for each prefix of whole blocks.

    A block has `BLOCK_BYTES` bytes. The list is empty for a shorter prompt or a body without a
    prompt. The prompt includes model, cache salt, tools and system text.

    Args:
        body: JSON of a request to an endpoint that generates tokens.
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
    """Return keyed 64-bit digests of `data`, one for each prefix of whole blocks, in order."""
    state = blake2b(key=secret[:_KEY_BYTES], digest_size=_DIGEST_BYTES, person=b"jaxserve route")
    digests = []
    for start in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
        state.update(data[start : start + BLOCK_BYTES])
        digests.append(int.from_bytes(state.copy().digest(), "little"))
    return digests


def _plain(prompt: Any) -> bytes:
    """Return a prompt (text, token ids, messages or a nested list) as bytes for digests.

    Prompts with equal beginnings have bytes with equal beginnings.
    """
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
    """The digests of the prompt prefixes that a replica has served and that its KV cache still has.

    Beyond the size of the cache, the least recently used digests are dropped, as the cache drops
    pages.

    Args:
        secret: secret of the fleet, the key of digests.
        num_tokens: number of tokens in the pages of the cache.
    """

    def __init__(self, secret: bytes, num_tokens: int) -> None:
        self._secret = secret
        self._most = max(1, num_tokens * TOKEN_BYTES // BLOCK_BYTES)
        self._used: OrderedDict[int, None] = OrderedDict()

    def add(self, body: bytes) -> None:
        """Record the digests of the prompt in the JSON body of a served request."""
        self.add_digests(digests_of(body, self._secret))

    def add_digests(self, digests: list[int]) -> None:
        # Long prefixes are dropped first, like their pages.
        for digest in reversed(digests):
            self._used[digest] = None
            self._used.move_to_end(digest)
        while len(self._used) > self._most:
            self._used.popitem(last=False)

    def report(self) -> bytes:
        """Return the most recently used digests as bytes, 8 per digest, at most `MOST_DIGESTS`."""
        return array("Q", islice(reversed(self._used), MOST_DIGESTS)).tobytes()


def reported(report: bytes) -> frozenset[int]:
    """Return the set of digests in the bytes of `PrefixRecord.report`."""
    return frozenset(array("Q", report))


class Recorder:
    """ASGI middleware that adds the prompt of each answered request to a `PrefixRecord`.

    Only POST requests whose answer has status 200 are recorded, since a refused prompt is not in
    the cache.
    """

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


Name = TypeVar("Name", bound=Hashable)
# A replica is avoided if its load exceeds the mean load times this factor plus this share of its
# slots.
MOST_OVER_MEAN = 1.25
SLACK_OF_SLOTS = 0.25
# A report contains a prompt after the replica has computed it. A sent prompt counts as cached until
# this number of reports has arrived.
REPORTS_UNTIL_HELD = 30
# A shorter matching share of a prompt does not affect the choice.
LEAST_SHARE = 0.25


@dataclass
class _Replica:
    """A router's view of one replica: its newest report, and the requests sent to it since."""

    report: Any = None
    cached: frozenset[int] = frozenset()  # digests in the last report
    # Digests of sent requests, each with the number of reports before it.
    sent: OrderedDict[int, int] = field(default_factory=OrderedDict)
    num_reports: int = 0
    load: int = 0  # number of requests in progress at the time of the last report
    num_sent: int = 0  # number of requests sent since the last report
    blocks: int = 0  # estimated number of blocks that the replica has computed

    def matched(self, digests: list[int]) -> int:
        """Return the number of leading blocks of a prompt that the replica has cached.

        `digests` has a digest for each block. Prompts of sent requests count as cached.
        """
        for count, digest in enumerate(digests):
            if digest not in self.cached and digest not in self.sent:
                return count
        return len(digests)


class PrefixPolicy(Generic[Name]):
    """The policy by which a router chooses the replica for a prompt: cached prefixes, then load.

    Candidates are replicas whose load (requests in progress) is at most `MOST_OVER_MEAN` times the
    mean load plus `SLACK_OF_SLOTS` of the slots. The policy takes the candidate with the most
    cached blocks of the prompt, if they are at least `LEAST_SHARE` of it, then the one with the
    least load, then the one with the least work so far. Cached blocks are those in the last report
    and those of requests sent since.

    Args:
        slots: number of requests that a replica runs at once.
    """

    def __init__(self, slots: int) -> None:
        self._slack = max(1.0, SLACK_OF_SLOTS * slots)
        self._replicas: dict[Name, _Replica] = {}

    def keep(self, names: Iterable[Name]) -> None:
        """Set the running replicas to `names`, and drop the state of all other replicas."""
        self._replicas = {name: self._replicas.get(name) or _Replica() for name in names}

    def report(self, name: Name, stats: dict[str, Any]) -> None:
        """Update the load and the cached digests of a replica from its report (`routing_stats`).

        An object that was passed before has no effect.
        """
        replica = self._replicas[name]
        if not stats or stats is replica.report:
            return
        replica.num_reports += 1
        oldest = replica.num_reports - REPORTS_UNTIL_HELD
        while replica.sent and next(iter(replica.sent.values())) < oldest:
            replica.sent.popitem(last=False)
        replica.report = stats
        replica.cached = reported(stats["prefixes"])
        replica.load, replica.num_sent = stats["load"], 0

    def rank(self, names: Iterable[Name], digests: list[int]) -> list[Name]:
        """Return all named replicas in order of preference for the prompt with these digests."""
        replicas = {name: self._replicas.setdefault(name, _Replica()) for name in names}
        loads = {name: replica.load + replica.num_sent for name, replica in replicas.items()}
        bound = MOST_OVER_MEAN * sum(loads.values()) / max(len(loads), 1) + self._slack

        def order(name: Name) -> tuple[bool, int, int, int]:
            is_free = loads[name] <= bound
            matched = replicas[name].matched(digests) if is_free else 0
            # A common beginning, such as a system prompt, must not attract all prompts.
            score = matched if matched >= LEAST_SHARE * len(digests) else 0
            return not is_free, -score, loads[name], replicas[name].blocks

        return sorted(replicas, key=order)

    def send(self, name: Name, digests: list[int]) -> None:
        """Record that a request with these digests is sent to a replica.

        The load of the replica grows by one, and the prompt counts as cached there.
        """
        replica = self._replicas[name]
        replica.num_sent += 1
        replica.blocks += len(digests) - replica.matched(digests) + 1
        for digest in digests:
            replica.sent[digest] = replica.num_reports
            replica.sent.move_to_end(digest)
