"""PrefixPolicy: which replica a prompt is sent to, by what each holds and has to do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from jaxserve.fleet.prefixes import reported

Name = TypeVar("Name", bound=Hashable)
# A replica is passed over where its load exceeds the mean of all by this factor and by this part
# of its slots, which would otherwise stand empty.
MOST_OVER_MEAN = 1.25
SLACK_OF_SLOTS = 0.25
# A prompt that was sent is in a report once it has been computed, so that it is remembered until
# these many have come, and forgotten where it is in none.
REPORTS_UNTIL_HELD = 30
# Less than this part of a prompt is not worth a way.
LEAST_SHARE = 0.25


@dataclass
class _Replica:
    """Knowledge of a replica.

    Attributes:
        report: the last one, as it came.
        held: its digests.
        sent: digests of requests sent there, each with the number of reports before it.
        num_reports: reports so far.
        load: requests in progress when it reported.
        num_sent: requests sent there since.
        blocks: computed there so far, as far as is known from here.
    """

    report: Any = None
    held: frozenset[int] = frozenset()
    sent: OrderedDict[int, int] = field(default_factory=OrderedDict)
    num_reports: int = 0
    load: int = 0
    num_sent: int = 0
    blocks: int = 0

    def matched(self, digests: list[int]) -> int:
        """Return how many blocks of a prompt are there, from its first."""
        for count, digest in enumerate(digests):
            if digest not in self.held and digest not in self.sent:
                return count
        return len(digests)


class PrefixPolicy(Generic[Name]):
    """The policy of a fleet's router.

    Of the replicas whose load, requests in progress there, is at most `MOST_OVER_MEAN` times the
    mean of all and `SLACK_OF_SLOTS` more, it takes the one that holds most blocks of the prompt, if
    these are `LEAST_SHARE` of it; of several the least loaded, then that with the least work so
    far. What replicas hold is what they report, and what was sent there since.

    Args:
        slots: requests that a replica runs at once.
    """

    def __init__(self, slots: int) -> None:
        self._slack = max(1.0, SLACK_OF_SLOTS * slots)
        self._replicas: dict[Name, _Replica] = {}

    def keep(self, names: Iterable[Name]) -> None:
        """Take over which replicas there are."""
        self._replicas = {name: self._replicas.get(name) or _Replica() for name in names}

    def report(self, name: Name, stats: dict[str, Any]) -> None:
        """Take over a replica's report; one that was taken before changes nothing."""
        replica = self._replicas[name]
        if not stats or stats is replica.report:
            return
        replica.num_reports += 1
        oldest = replica.num_reports - REPORTS_UNTIL_HELD
        while replica.sent and next(iter(replica.sent.values())) < oldest:
            replica.sent.popitem(last=False)
        replica.report = stats
        replica.held = reported(stats["prefixes"])
        replica.load, replica.num_sent = stats["load"], 0

    def rank(self, names: Iterable[Name], digests: list[int]) -> list[Name]:
        """Return replicas in order, the best for a prompt first."""
        replicas = {name: self._replicas.setdefault(name, _Replica()) for name in names}
        loads = {name: replica.load + replica.num_sent for name, replica in replicas.items()}
        bound = MOST_OVER_MEAN * sum(loads.values()) / max(len(loads), 1) + self._slack

        def order(name: Name) -> tuple[bool, int, int, int]:
            is_free = loads[name] <= bound
            matched = replicas[name].matched(digests) if is_free else 0
            # What most prompts begin with, such as a system prompt, draws nobody to a replica.
            found = matched if matched >= LEAST_SHARE * len(digests) else 0
            return not is_free, -found, loads[name], replicas[name].blocks

        return sorted(replicas, key=order)

    def send(self, name: Name, digests: list[int]) -> None:
        """Count a request as sent to a replica."""
        replica = self._replicas[name]
        replica.num_sent += 1
        replica.blocks += len(digests) - replica.matched(digests) + 1
        for digest in digests:
            replica.sent[digest] = replica.num_reports
            replica.sent.move_to_end(digest)
