"""Suppliers of compiled programs, each of which knows an engine by its StartPlan alone."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

from jax.stages import Compiled

from jaxserve.execution.buckets import Key
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.start.programs.compiler import Compiler
from jaxserve.start.programs.described_card import DescribedCard
from jaxserve.start.programs.store import ProgramStore


class ProgramSupplier(Protocol):
    """Type of the suppliers of a plan's compiled programs.

    A supplier is made from a plan and a store only, so that it may work in another process or
    without the device. `Compiling` compiles in this process, `Stored` reads files, and
    `CompilingProcess` compiles in the background.
    """

    def supply(self, key: Key) -> Compiled | None:
        """Return the compiled program of a key, or None if the supplier lacks it. Thread-safe."""
        ...

    def close(self) -> None:
        """End the processes and files of the supplier. Idempotent."""
        ...


class Stored:
    """Supplier of the programs that have a file in the store. It compiles no program.

    Args:
        plan: plan of the start.
        store: store of its programs.
    """

    def __init__(self, plan: StartPlan, store: ProgramStore) -> None:
        self.plan, self.store = plan, store

    def supply(self, key: Key) -> Compiled | None:
        """Load the program of a key from its file, or return None without a file. Thread-safe."""
        return self.store.find(self.plan.program_name(key))

    def has(self, key: Key) -> bool:
        """Return whether the program of a key has a file in the store."""
        return self.store.has(self.plan.program_name(key))

    def close(self) -> None:
        """Do nothing: this supplier has no threads, processes or open files."""


class Compiling:
    """Supplier that loads programs from the store's files, or compiles them in this process.

    Args:
        plan: plan of the start.
        store: store of its programs.
        card: absent card to compile for, or None for JAX's device.

    Attributes:
        compiler: compiler of the plan's programs.
    """

    def __init__(
        self, plan: StartPlan, store: ProgramStore, card: DescribedCard | None = None
    ) -> None:
        self.compiler = Compiler(plan, card)
        self._store = store

    def supply(self, key: Key) -> Compiled:
        """Load the program of a key from its file, or compile it into the store. Thread-safe."""
        name = self.compiler.plan.program_name(key)
        return self._store.get(name, partial(self.compiler.lower, key))

    def close(self) -> None:
        """Do nothing: compilations end with the threads that run them."""


class CompilingThreads:
    """Supplier that runs another supplier in threads, before its programs are needed.

    Args:
        supplier: supplier of the programs.
        count: number of threads.
    """

    def __init__(self, supplier: ProgramSupplier, count: int) -> None:
        self._supplier = supplier
        self._futures: dict[Key, Future[Compiled | None]] = {}
        self._pool = ThreadPoolExecutor(count, "jaxserve-compile")

    def put(self, key: Key, program: Compiled) -> None:
        """Add the compiled program of a key, which `supply` then returns."""
        self._futures[key] = future = Future[Compiled | None]()
        future.set_result(program)

    def submit(self, keys: Iterable[Key]) -> None:
        """Queue the programs of keys for the threads, without keys that were submitted before."""
        for key in keys:
            if key not in self._futures:
                self._futures[key] = self._pool.submit(self._supplier.supply, key)

    def supply(self, key: Key) -> Compiled:
        """Return the compiled program of a key, after a wait for the thread that supplies it.

        The key is submitted if it has not been submitted before.
        """
        self.submit([key])
        program = self._futures[key].result()
        assert program is not None
        return program

    def close(self, wait: bool = True) -> None:
        """Drop the programs that wait for a thread. Idempotent.

        Args:
            wait: whether to wait for the programs that threads compile now.
        """
        self._pool.shutdown(wait, cancel_futures=True)
