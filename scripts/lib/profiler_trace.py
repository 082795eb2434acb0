"""Reader of a profiler's trace of compiled steps: how long each kind of operation ran."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

WEIGHTS = "products with weights"
GATHER = "attention: gather of pages"
PRODUCTS = "attention: products"
ATTENTION = "attention: the rest"
WRITE = "write of K and V"
SAMPLER = "sampler"
REST = "the rest"
CLASSES = (WEIGHTS, PRODUCTS, GATHER, ATTENTION, WRITE, SAMPLER, REST)

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*?[\])}] ([a-z][\w-]*)\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
ATTENTION_KERNELS = ("paged_decode", "ragged_paged", "jaxserve_decode", "jaxserve_tiles")
# Operations that only run others, which have events of their own.
_CONTAINERS = ("while", "conditional", "call")


@dataclass(frozen=True)
class Instruction:
    """Instruction: one of a program's operations.

    Attributes:
        opcodes: its own, and the opcodes of the computation that it fuses.
        op_name: where in the model it comes from.
        target: of a custom call.
    """

    opcodes: frozenset[str]
    op_name: str
    target: str = ""


def instructions(hlo: str) -> dict[str, Instruction]:
    """Parse every instruction of a compiled program's text, by name."""
    bodies: dict[str, list[str]] = defaultdict(list)
    inside: dict[str, set[str]] = defaultdict(set)
    current = ""
    for line in hlo.splitlines():
        if begins := _COMPUTATION.match(line):
            current = begins[1]
        elif found := _INSTRUCTION.match(line):
            bodies[current].append(line)
            inside[current].add(found[2])
    result = {}
    for line in (line for body in bodies.values() for line in body):
        found = _INSTRUCTION.match(line)
        assert found is not None
        called = _CALLED.findall(line) if found[2] in ("fusion", "custom-call") else []
        opcodes = {found[2]}.union(*(inside[name] for name in called))
        path, target = _OP_NAME.search(line), _TARGET.search(line)
        result[found[1]] = Instruction(
            frozenset(opcodes), path[1] if path else "", target[1] if target else ""
        )
    return result


def class_of(name: str, instruction: Instruction) -> str:
    """Choose which of `CLASSES` an operation belongs to.

    The path names its part of the model, the opcodes its operation there. Products of attention run
    in loops over chunks, products with its weights outside of them.
    """
    path, codes = f"/{instruction.op_name}/", instruction.opcodes
    if "/sample/" in path or "/scores/" in path:
        return SAMPLER
    # A launch of several steps is itself a loop: only loops within attention count.
    _, attends, within = path.partition("/attention/")
    kernel = f"{name} {instruction.target}"
    in_kernel = any(word in kernel for word in ATTENTION_KERNELS)
    is_product = "dot" in codes or any(word in kernel for word in ("gemm", "matmul", "_product_"))
    if in_kernel or (attends and is_product and "while/" in within):
        return PRODUCTS
    if is_product:
        return WEIGHTS
    if attends:
        if (
            "kv_write" in name
            or "scatter" in codes
            or path.endswith(("/scatter/", "_update_slice/"))
        ):
            return WRITE
        return GATHER if "gather" in codes or "dynamic-slice" in codes else ATTENTION
    return REST


def read_events(trace: Path) -> list[dict[str, Any]]:
    """Read the complete events of a trace in Chrome's form.

    Of a GPU's, take the streams alone: the profiler adds lines that repeat their events.
    """
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {
        (event["name"], event.get("pid"), event.get("tid")): str(event.get("args", {}).get("name"))
        for event in events
        if event.get("ph") == "M" and event["name"] in ("process_name", "thread_name")
    }
    processes = {key[1]: name for key, name in names.items() if key[0] == "process_name"}
    cards = {pid for pid, name in processes.items() if "GPU" in name}
    threads = {key[1:]: name for key, name in names.items() if key[0] == "thread_name"}
    streams = {key for key, name in threads.items() if name.startswith("Stream")}
    with_streams = {pid for pid, _ in streams} & cards
    repeats = {key for key in threads if key[0] in with_streams} - streams
    found = [event for event in events if event.get("ph") == "X"]
    for event in found:
        event["on_card"] = event.get("pid") in cards
    return [event for event in found if (event.get("pid"), event.get("tid")) not in repeats]


@contextmanager
def recorded(host_level: int, copy: Path | None = None) -> Iterator[list[dict[str, Any]]]:
    """Run a block under JAX's profiler. Yield a list, which gets the events when the block ends.

    Args:
        host_level: detail of the host's events, from 0 to 3.
        copy: file that gets the trace.
    """
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level, options.python_tracer_level = host_level, 0
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            yield events
        [trace] = Path(folder).rglob("*.trace.json.gz")
        events += read_events(trace)
        if copy is not None:
            shutil.copyfile(trace, copy)


def kernel_times(events: Iterable[Mapping[str, Any]]) -> dict[str, tuple[float, int]]:
    """Sum microseconds and runs of kinds of kernels, longest first.

    Numbers at the end of a name are left out: every layer has its own. Without a card it is the
    operations of the program.
    """
    events = list(events)
    on_card = [event for event in events if event.get("on_card")]
    if on_card:
        runs = [(event["name"], event["dur"], 1) for event in on_card]
    else:
        runs = [(name, *spent) for name, spent in self_times(events).items()]
    found: dict[str, tuple[float, int]] = {}
    for name, micros, count in runs:
        kind = re.sub(r"([._]\d+)+$", "", name)
        before = found.get(kind, (0.0, 0))
        found[kind] = before[0] + micros, before[1] + count
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


def self_times(events: Iterable[Mapping[str, Any]]) -> dict[str, tuple[float, int]]:
    """Sum microseconds and runs of each operation, without operations inside it."""
    threads: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if "hlo_op" in event.get("args", {}) and not event["name"].startswith("end: "):
            threads[event["pid"], event["tid"]].append(event)
    spent: dict[str, float] = defaultdict(float)
    runs: dict[str, int] = defaultdict(int)
    for thread in threads.values():
        stack: list[Mapping[str, Any]] = []
        for event in sorted(thread, key=lambda entry: (entry["ts"], -entry["dur"])):
            while stack and event["ts"] >= stack[-1]["ts"] + stack[-1]["dur"]:
                stack.pop()
            name = event["args"]["hlo_op"]
            if stack:
                spent[stack[-1]["args"]["hlo_op"]] -= event["dur"]
            spent[name] += event["dur"]
            runs[name] += 1
            stack.append(event)
    return {name: (max(micros, 0.0), runs[name]) for name, micros in spent.items()}


@dataclass(frozen=True)
class DeviceTime:
    """Time of a step on the device.

    Attributes:
        micros: class -> microseconds of a step.
        operations: (microseconds of a step, runs a step, name, class, where from), longest first.
    """

    micros: dict[str, float]
    operations: list[tuple[float, float, str, str, str]]


def device_time(events: list[dict[str, Any]], hlo: str, steps: int) -> DeviceTime:
    """Add up the operations of a trace of `steps` runs of one program."""
    by_name = instructions(hlo)
    micros: dict[str, float] = dict.fromkeys(CLASSES, 0.0)
    operations = []
    for name, (spent, runs) in self_times(events).items():
        instruction = by_name.get(name)
        kind = REST if instruction is None else class_of(name, instruction)
        if instruction is not None and instruction.opcodes & set(_CONTAINERS):
            kind = ATTENTION if "/attention/" in f"/{instruction.op_name}/" else REST
        micros[kind] += spent / steps
        path = "" if instruction is None else instruction.op_name
        operations.append((spent / steps, runs / steps, name, kind, path))
    return DeviceTime(micros, sorted(operations, reverse=True))
