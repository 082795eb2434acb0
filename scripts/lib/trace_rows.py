"""Rows of the bundled request traces (see traces/README.md for their origin and licences)."""

from __future__ import annotations

import csv
from itertools import islice
from typing import NamedTuple

from scripts.lib.paths import TRACES as FOLDER

TRACES = {
    "azure-conv": "azure_llm_2023_conv.csv",
    "azure-code": "azure_llm_2023_code.csv",
    "mooncake": "mooncake_fast25_synthetic.csv",
}
HASHED_TOKENS = 512


class TraceRow(NamedTuple):
    """Request of a trace: seconds since the first, prompt tokens, generated tokens, and, where the
    trace has them, an id for each 512 tokens of its prompt."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def read_trace(rows: int | None = None, trace: str = "azure-conv") -> list[TraceRow]:
    """Read the first `rows` requests of a trace, or all, in the order of their arrival."""
    with (FOLDER / TRACES[trace]).open(newline="") as file:
        records = islice(csv.DictReader(file), rows)
        return [
            TraceRow(
                float(r["arrival_s"]),
                int(r["input_tokens"]),
                int(r["output_tokens"]),
                tuple(map(int, (r.get("hash_ids_512tok") or "").split())),
            )
            for r in records
        ]


def first_rows(count: int, trace: str = "azure-conv") -> list[TraceRow]:
    """Read exactly the first `count` requests of a trace.

    Raises:
        ValueError: it has fewer.
    """
    rows = read_trace(count, trace)
    if len(rows) < count:
        raise ValueError(f"the trace has {len(rows):,} requests; {count:,} cannot be sent")
    return rows
