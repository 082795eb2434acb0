"""Measure a server's memory under two former causes of growth: failing steps and odd grammars.

    python -m tests.server.memory
    python -m tests.server.memory --rounds 4 --requests 250

Prints the resident size after each round of requests.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.server.failing import MARK
from tests.support.live_server import Server

ARGUMENTS = (
    "--max-num-seqs 8 --decode-sizes 8 --token-sizes 128 --max-num-batched-tokens 128 --port 0"
)


def failing(number: int) -> dict[str, Any]:
    """Return a request whose steps fail."""
    return {"prompt": [*MARK, number % 500 + 16], "max_tokens": 4}


def schema(number: int) -> dict[str, Any]:
    """Return a request with its own JSON schema of many properties."""
    draw = random.Random(number)
    names = [f"p{draw.randrange(10**6)}" for _ in range(draw.randint(1, 40))]
    kinds: list[dict[str, Any]] = [
        {"type": "integer"},
        {"type": "string", "maxLength": draw.randint(1, 5000)},
        {"enum": [f"v{draw.randrange(10**6)}" for _ in range(30)]},
        {"type": "array", "items": {"type": "number"}, "maxItems": draw.randint(1, 2000)},
        {"type": "string", "pattern": f"^[a-z]{{{draw.randint(1, 60)}}}-[0-9]{{1,30}}$"},
    ]
    made = {"type": "object", "properties": {name: draw.choice(kinds) for name in names}}
    return {"prompt": "a", "max_tokens": 8, "structured_outputs": {"json": made}}


def grammar(number: int) -> dict[str, Any]:
    """Return a request with its own regular expression or grammar, some of them meaningless."""
    draw = random.Random(number)
    forms = [
        {"regex": f"(a|b){{{draw.randint(1, 200)}}}c{{{draw.randint(1, 999)}}}{number}"},
        {"regex": f"([0-9]{{1,{draw.randint(1, 99)}}}-)*{number}("},
        {"grammar": f'start: "{number}" start | "b" /[a-z]{{1,{draw.randint(1, 300)}}}/'},
        {"grammar": f'start: "{number}" | nothing'},
        {"choice": [f"{number}-{one}" for one in range(draw.randint(1, 500))]},
    ]
    form = forms[number % len(forms)]
    return {"prompt": "a", "max_tokens": 8, "structured_outputs": form}


KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda number: {"prompt": [5, number % 500 + 16], "max_tokens": 8},
    "failing": failing,
    "schema": schema,
    "grammar": grammar,
}


def rounds(server: Server, kind: str, count: int, each: int) -> Iterator[float]:
    """Yield the resident MiB after each of `count` rounds of `each` requests."""
    make = KINDS[kind]
    with ThreadPoolExecutor(4) as pool:
        for first in range(0, count * each, each):
            bodies = [make(number) for number in range(first, first + each)]
            for answer in pool.map(lambda body: server.request("/v1/completions", body), bodies):
                assert answer.status in (200, 400, 500), answer.body
            yield server.memory() / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=10, metavar="N")
    parser.add_argument("--requests", type=int, default=100, metavar="N", help="of each round")
    asked = parser.parse_args()
    with Server(ARGUMENTS.split(), module="tests.server.failing") as server:
        print(f"at the start: {server.memory() / 2**20:.0f} MiB")
        for kind in asked.kinds.split(","):
            sizes = rounds(server, kind, asked.rounds, asked.requests)
            print(f"{kind}:", *(f"{size:.0f}" for size in sizes), "MiB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
