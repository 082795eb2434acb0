"""Attack a live server as the tests do, at full size; figures go to scripts/results.

    python -m tests.server.soak --items 3,4,6,13,15,22,42
    python -m tests.server.soak --items 43,44,45,50

Every item is followed by a request whose tokens must be unchanged, on a server that
holds no page and no slot, has compiled nothing and lost no step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.server import attacks
from tests.server.attacks import Figures
from tests.server.test_http import BAD_JSON
from tests.support.live_server import ROOT, SMALL, Canary, Server

RESULTS = ROOT / "scripts" / "results" / "soak.json"
KEYS = ("first-key", "second-key")
QUEUE = "--max-num-queued-reqs 4000 --max-queued-prompt-tokens 10000000 --queue-timeout 600"
# Few slots and pages, so that clients leave while their requests wait and are preempted.
NARROW = [*SMALL, *QUEUE.split()]
WIDE = (
    "--max-num-seqs 32 --max-num-batched-tokens 128 --decode-sizes 1,32 --token-sizes 128 "
    "--check-invariants --port 0 --max-unread-tokens 64 --send-buffer-bytes 4096"
).split() + QUEUE.split()


@dataclass(frozen=True)
class Item:
    """One kind of attack at its full size.

    Attributes:
        arguments: of its server.
        attack: run against it.
        limits: the most that each figure may be.
        keys: whether the server asks for one.
    """

    arguments: list[str]
    attack: Callable[[Server], Figures]
    limits: Figures
    keys: bool = False


def _bad_json(server: Server) -> Figures:
    return attacks.slowest_refusal(server, list(BAD_JSON.values()))


def _too_many(server: Server) -> Figures:
    fields: list[dict[str, object]] = [{"n": n} for n in (0, -1, 17, 10**9)]
    fields += [{"prompt": ["a"] * 100_000}, {"prompt": ["a"] * 65}]
    bodies = [json.dumps({"prompt": "a", **one}).encode() for one in fields]
    return attacks.slowest_refusal(server, bodies)


def _pipelines(server: Server) -> Figures:
    return attacks.pipelined(server, 10_000) | attacks.reset_in_the_body(server, 1000)


def _prefixes(server: Server) -> Figures:
    told = attacks.prefix_timing(server, 200, KEYS[0], KEYS[0])["area_under_curve"]
    return attacks.prefix_timing(server, 1000, *KEYS) | {"same_key_area_under_curve": told}


ITEMS = {
    "3": Item(NARROW, lambda one: attacks.half_open(one, 1000), {"all_closed_after_s": 12.0}),
    "4": Item(NARROW, lambda one: attacks.slow_body(one, 1.0), {"answered_after_s": 32.0}),
    "6": Item(NARROW, lambda one: attacks.tiny_chunks(one, 3 << 20), {"server_cpu_s": 1.0}),
    "13": Item(NARROW, _bad_json, {"slowest_ms": 100.0}),
    "15": Item(NARROW, _pipelines, {}),
    "22": Item(NARROW, _too_many, {"slowest_ms": 50.0}),
    "42": Item(NARROW, lambda one: attacks.leave_in_every_phase(one, 1000), {}),
    "43": Item(WIDE, lambda one: attacks.never_read(one, 500), {}),
    "44": Item(WIDE, lambda one: attacks.head_of_line(one, 20.0, 1022), {"ratio": 2.0}),
    "45": Item(WIDE, _prefixes, {"area_under_curve": 0.55}, keys=True),
    "50": Item(WIDE, lambda one: attacks.flood(one, 10_000), {"p99_of_a_client_beside_ms": 50.0}),
}


def run(name: str, item: Item, server: Server, canary: Canary) -> dict[str, object]:
    """Return the figures of an item, and the list of figures that exceed a limit."""
    figures = item.attack(server)
    canary.check()
    over = [key for key, most in item.limits.items() if figures[key] > most]
    print(f"item {name}:", *(f"{key} {value:.4g}" for key, value in figures.items()), sep="  ")
    print("  the canary sings as before;", f"over the limit: {over}" if over else "within limits")
    return {"date": time.strftime("%Y-%m-%d"), **figures, "over_the_limit": over}


def save(results: dict[str, dict[str, object]], path: Path = RESULTS) -> None:
    """Merge results into a file that has the results of other items."""
    known = json.loads(path.read_text()) if path.exists() else {}
    known |= results
    ordered = {name: known[name] for name in sorted(known, key=int)}
    path.write_text(json.dumps(ordered, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--items", default=",".join(ITEMS), help="default: %(default)s")
    names = parser.parse_args().items.split(",")
    if set(names) - ITEMS.keys():
        parser.error(f"items are {', '.join(ITEMS)}")
    results: dict[str, dict[str, object]] = {}
    servers = {(tuple(ITEMS[name].arguments), ITEMS[name].keys) for name in names}
    for arguments, keys in sorted(servers):
        flags = [part for key in KEYS for part in ("--api-key", key)] if keys else []
        with Server([*arguments, *flags], key=KEYS[0] if keys else None) as server:
            canary = Canary(server)
            for name in names:
                item = ITEMS[name]
                if (tuple(item.arguments), item.keys) == (arguments, keys):
                    results[name] = run(name, item, server, canary)
                    save({name: results[name]})
    return int(any(result["over_the_limit"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
