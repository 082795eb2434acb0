"""PrefixPolicy: the choice of a replica by its cached prefixes and its load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from jaxserve.fleet.prefixes import reported

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
    """State of a replica as its reports and the sent requests show it."""

    report: Any = None
    cached: frozenset[int] = frozenset()  # digests in the last report
    # Digests of sent requests, each with the number of reports before it.
    sent: OrderedDict[int, int] = field(default_factory=OrderedDict)
    num_reports: int = 0
    load: int = 0  # number of requests in progress at the time of the last report
    num_sent: int = 0  # number of requests sent since the last report
    blocks: int = 0  # estimated number of blocks that the replica has computed

    def matched(self, digests: list[int]) -> int:
        """Return the number of leading blocks of a prompt that the replica has cached."""
        for count, digest in enumerate(digests):
            if digest not in self.cached and digest not in self.sent:
                return count
        return len(digests)


class PrefixPolicy(Generic[Name]):
    """The policy by which a router chooses a replica.

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
        """Forget all replicas except `names`."""
        self._replicas = {name: self._replicas.get(name) or _Replica() for name in names}

    def report(self, name: Name, stats: dict[str, Any]) -> None:
        """Update a replica from its report. The same report twice has no effect."""
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
        """Return the replicas in order of preference for a prompt with these digests."""
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
        """Record that a request with these digests is sent to a replica."""
        replica = self._replicas[name]
        replica.num_sent += 1
        replica.blocks += len(digests) - replica.matched(digests) + 1
        for digest in digests:
            replica.sent[digest] = replica.num_reports
            replica.sent.move_to_end(digest)
