"""A plugin of pytest that prints where the CPU seconds of a run went, by folder of tests.

A case includes its fixtures, so a shared fixture counts for the first folder that uses it. Parts
of a process are measured by `time.thread_time`, except XLA: its compiler works on threads of its
own, so all CPU time of the process counts while it compiles. Other processes (servers, scripts)
have one column for their CPU seconds; their programs are not counted.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from pathlib import PurePath
from typing import Any

import pytest

TRACING = frozenset(
    f"/jax/core/compile/{name}_duration" for name in ("jaxpr_trace", "jaxpr_to_mlir_module")
)
PARTS = ("tracing", "XLA", "LLVM", "cache")
OUTSIDE = "collection"
KEY = "jaxserve_costs"  # of a worker's output


class Costs:
    """CPU seconds and programs by folder.

    Attributes:
        seconds: by folder and part; "all" is this process, "others" are its children.
        counts: by folder: cases, and programs that were compiled or found.
        programs: by folder: the keys of all programs, compiled or found.
    """

    def __init__(self, is_by_file: bool = False) -> None:
        self.seconds: defaultdict[str, defaultdict[str, float]] = defaultdict(
            partial(defaultdict, float)
        )
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.programs: defaultdict[str, set[str]] = defaultdict(set)
        self.folder = OUTSIDE
        self._is_by_file = is_by_file
        self._stacks = threading.local()
        self._lock = threading.Lock()
        self._compiling = 0
        self._compiling_since = 0.0

    def folder_of(self, nodeid: str) -> str:
        """Return the row of a test: its folder below tests/, or its file."""
        path = PurePath(nodeid.split("::", 1)[0])
        if self._is_by_file:
            return str(path.relative_to("tests"))
        return path.parts[1] if len(path.parts) > 2 else "(beside the folders)"

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        """Count this thread's CPU time for `name`, less that of parts within it."""
        stack: list[float] = self._stacks.__dict__.setdefault("stack", [])
        began = time.thread_time()
        stack.append(0.0)
        try:
            yield
        finally:
            elapsed = time.thread_time() - began
            within = stack.pop()
            if stack:
                stack[-1] += elapsed
            with self._lock:
                self.seconds[self.folder][name] += max(0.0, elapsed - within)

    @contextmanager
    def compiling(self) -> Generator[None]:
        """Count the process's CPU time for XLA while at least one thread compiles."""
        with self._lock:
            self._compiling += 1
            if self._compiling == 1:
                self._compiling_since = time.process_time()
        try:
            with self.part("in XLA"):
                yield
        finally:
            with self._lock:
                self._compiling -= 1
                if not self._compiling:
                    spent = time.process_time() - self._compiling_since
                    self.seconds[self.folder]["XLA"] += spent

    def count(self, name: str, key: str = "") -> None:
        with self._lock:
            self.counts[self.folder][name] += 1
            if key:
                self.programs[self.folder].add(key[:16])

    def plain(self) -> list[Any]:
        """Return all as values that xdist can send."""
        seconds = {folder: dict(parts) for folder, parts in self.seconds.items()}
        counts = {folder: dict(parts) for folder, parts in self.counts.items()}
        return [seconds, counts, {folder: sorted(keys) for folder, keys in self.programs.items()}]

    def add(self, plain: list[Any]) -> None:
        """Add what `plain` returned in another process."""
        for mine, others in zip((self.seconds, self.counts), plain[:2], strict=True):
            for folder, parts in others.items():
                for name, number in parts.items():
                    mine[folder][name] += number
        for folder, keys in plain[2].items():
            self.programs[folder].update(keys)


def watch(costs: Costs) -> None:
    """Measure JAX, XLA and LLVM in this process from now on."""
    # Imported here: JAX reads the variables that tests/conftest.py sets when it is imported.
    from jax._src import compilation_cache, compiler, dispatch
    from jax._src.interpreters import mlir
    from jax.experimental import serialize_executable

    from pallas_kernels.cpu import ffi

    elapsed = dispatch.LogElapsedTimeContextManager
    enter, leave, open_parts = elapsed.__enter__, elapsed.__exit__, threading.local()

    def entered(self: Any) -> Any:
        if self.event in TRACING:
            part = costs.part("tracing")
            part.__enter__()
            open_parts.__dict__.setdefault("parts", []).append(part)
        return enter(self)

    def left(self: Any, *error: Any) -> None:
        leave(self, *error)
        if self.event in TRACING:
            open_parts.parts.pop().__exit__(None, None, None)

    elapsed.__enter__, elapsed.__exit__ = entered, left  # type: ignore[method-assign]

    def within(owner: Any, name: str, part: str, after: Callable[[Any, Any], None]) -> None:
        function = getattr(owner, name)

        def measured(*arguments: Any, **options: Any) -> Any:
            with costs.compiling() if part == "XLA" else costs.part(part):
                result = function(*arguments, **options)
            after(arguments, result)
            return result

        setattr(owner, name, measured)

    def read(arguments: Any, result: Any) -> None:
        if result[0] is not None:
            costs.count("found", arguments[0])

    def written(arguments: Any, _result: Any) -> None:
        costs.count("", arguments[0])

    def compiled(arguments: Any, _result: Any) -> None:
        costs.count("compiled")
        if not compilation_cache.is_persistent_cache_enabled():  # it has no key
            costs.count("", hashlib.sha256(mlir.module_to_bytecode(arguments[1])).hexdigest())

    def loaded(arguments: Any, _result: Any) -> None:
        costs.count("found", hashlib.sha256(arguments[0]).hexdigest())

    within(compilation_cache, "get_executable_and_time", "cache", read)
    within(compilation_cache, "put_executable_and_time", "cache", written)
    within(compiler, "backend_compile_and_load", "XLA", compiled)
    within(serialize_executable, "deserialize_and_load", "cache", loaded)
    within(serialize_executable, "serialize", "cache", lambda *_: None)
    within(ffi, "machine_code", "LLVM", lambda *_: costs.count("kernels"))


class Plugin:
    """Attributes every case to its folder, and prints the table at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.costs = Costs(is_by_file=bool(config.getoption("costs_by_file")))
        self._last = (0.0, 0.0)
        self._is_controller = bool(getattr(config.option, "numprocesses", None)) and not hasattr(
            config, "workerinput"
        )
        if not self._is_controller:
            watch(self.costs)

    @staticmethod
    def _times() -> tuple[float, float]:
        times = os.times()
        return times.user + times.system, times.children_user + times.children_system

    def _charge(self) -> None:
        """Give the CPU time since the last call to the current folder."""
        now = self._times()
        if self._is_controller:  # its children are the processes of tests, which count themselves
            now = now[0], 0.0
        for name, before, after in zip(("all", "others"), self._last, now, strict=True):
            self.costs.seconds[self.costs.folder][name] += after - before
        self._last = now

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._charge()
        self.costs.folder = self.costs.folder_of(item.nodeid)
        self.costs.count("cases")
        result = yield
        self._charge()
        self.costs.folder = OUTSIDE
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            self._charge()
            output[KEY] = self.costs.plain()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if KEY in getattr(node, "workeroutput", {}):
            self.costs.add(node.workeroutput[KEY])

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        self._charge()
        if self.costs.counts:
            terminalreporter.section("CPU seconds and programs")
            for line in table(self.costs):
                terminalreporter.write_line(line)


def table(costs: Costs) -> list[str]:
    """Return the lines of the table, the costliest folder first, and their sum."""
    heads = ["cases", "total", *PARTS, "rest", "others", "programs", "distinct", "found", "kernels"]

    def row(name: str, folders: Iterable[str]) -> list[str]:
        seconds: defaultdict[str, float] = defaultdict(float)
        counts: Counter[str] = Counter()
        keys: set[str] = set()
        for folder in folders:
            for part, number in costs.seconds[folder].items():
                seconds[part] += number
            counts.update(costs.counts[folder])
            keys |= costs.programs[folder]
        rest = seconds["all"] - sum(seconds[part] for part in PARTS)
        total = seconds["all"] + seconds["others"]
        numbers = [total, *(seconds[part] for part in PARTS), rest, seconds["others"]]
        programs = counts["compiled"] + counts["found"], len(keys), counts["found"]
        return [
            name,
            str(counts["cases"]),
            *(f"{number:.0f}" for number in numbers),
            *map(str, programs),
            str(counts["kernels"]),
        ]

    def total(folder: str) -> float:
        return costs.seconds[folder]["all"] + costs.seconds[folder]["others"]

    folders = sorted({*costs.seconds, *costs.counts}, key=total, reverse=True)
    rows = [["", *heads], *(row(folder, [folder]) for folder in folders), row("sum", folders)]
    width = max(len(cells[0]) for cells in rows)
    widths = [max(map(len, column)) for column in zip(*(cells[1:] for cells in rows), strict=True)]
    return [
        f"{cells[0]:<{width}}"
        + "".join(f"  {cell:>{size}}" for cell, size in zip(cells[1:], widths, strict=True))
        for cells in rows
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--costs-by-file", action="store_true", help="print CPU seconds by file, not by folder"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Plugin(config), "jaxserve-costs")
