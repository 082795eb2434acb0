"""Order of loads in compiled kernels whose launches may overlap, and XLA's estimates of them.

With programmatic launches a kernel may begin before the one ahead of it has ended. It has to wait
(``griddepcontrol.wait``, ACQBULK as assembled) before its first load, and the stores of the
kernel ahead must not be read as constants: such loads are assembled ahead of the wait at times.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any

WAIT, LAUNCH, READ_ONLY = "ACQBULK", "PREEXIT", "CONSTANT"
LOADS = re.compile(r"(LDG|LDGSTS|UTMALDG|UBLKCP|LD|ATOM|ATOMG|RED|STG|ST)(\.|$)")
"""Instructions that read or write global memory."""
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_KERNEL = re.compile(r"\] ([\w$]+) grid: ")
_COST = re.compile(r'"reification_cost":(\[[^]]*\])')
_ENTRY = re.compile(r'"memory_access_time_us":([\d.e+-]+),"name":"([^"]*)"')
MODELS = ("experimental-gemm-cost-model", "indexing-cost-model", "")
"""Names of XLA's estimates, the best first; the last one is wrong of fused rows."""


def read_order(sass: str) -> dict[str, int]:
    """Count accesses before the wait and read-only loads of a kernel, waits and early launches."""
    names = _INSTRUCTION.findall(sass)
    waits = [index for index, name in enumerate(names) if name.startswith(WAIT)]
    accesses = [index for index, name in enumerate(names) if LOADS.match(name)]
    return {
        "waits": len(waits),
        "before_wait": sum(index < waits[0] for index in accesses) if waits else 0,
        "read_only": sum(READ_ONLY in names[index] for index in accesses),
        "launches_early": sum(name.startswith(LAUNCH) for name in names),
    }


def neighbours(thunks: str) -> set[tuple[str, str]]:
    """Collect pairs of kernels of which the second is launched right after the first."""
    lines = [line for line in thunks.splitlines() if re.match(r"\s*\d+: k", line)]
    names = [found[1] if (found := _KERNEL.search(line)) else "" for line in lines]
    return {pair for pair in itertools.pairwise(names) if all(pair)}


def memory_micros(hlo: str) -> float:
    """Sum the memory times of XLA's own kernels by its cost model, in microseconds."""
    total = 0.0
    for estimates in _COST.findall(hlo):
        found = {name: float(micros) for micros, name in _ENTRY.findall(estimates)}
        total += next((found[name] for name in MODELS if name in found), 0.0)
    return round(total, 1)


def order_faults(kernels: dict[str, dict[str, int]], pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Find kernels that could read data before the kernel ahead has written them.

    It has to let them begin early. A read-only load counts wherever it stands: the assembler moves
    such loads ahead of the wait.
    """
    faults = []
    for first, second in sorted(pairs):
        if not kernels.get(first, {}).get("launches_early") or second not in kernels:
            continue
        order, where = kernels[second], f"{second}, after {first}"
        if not order["waits"]:
            faults.append(f"{where}: does not wait")
        if order["before_wait"]:
            faults.append(f"{where}: {order['before_wait']} accesses before it waits")
        if order["read_only"]:
            faults.append(f"{where}: {order['read_only']} read-only loads")
    return faults


def summary(name: str, row: dict[str, Any]) -> tuple[Any, ...]:
    """Return a line of the table: counts over the kernels of a program."""
    kernels = row["order"].values()
    waiting, early, read_only, launching = (
        sum(bool(order[field]) for order in kernels)
        for field in ("waits", "before_wait", "read_only", "launches_early")
    )
    counts = (len(row["order"]), waiting, early, launching, read_only)
    return (name, row["launches"], *counts, row["memory_us"])
