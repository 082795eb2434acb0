"""Base class of kernel calls that are compiled and executed."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from scripts.machine_code.compiled_program import Argument, Launch
from tests.machine_code.comparison import Tolerance

Capability = tuple[int, int]


class Case(abc.ABC):
    """Kernel call with arguments and a specification. Subclasses are frozen dataclasses.

    Attributes:
        name: unique among all cases.
        family: the kernel that it calls, as `cases.FAMILIES` has it.
        kernel_module: module in which the kernel is written.
        tolerances: how far each result may be off. The last one also applies to later results.
        donated: arguments that the kernel writes in place.
        dtypes: names of the types that the kernel is compiled for.
    """

    name: str
    family: str
    kernel_module: str
    tolerances: Sequence[Tolerance]
    donated: tuple[int, ...] = ()
    dtypes: str

    @abc.abstractmethod
    def arguments(self) -> Sequence[Argument]:
        """Make the arguments of the compiled program."""

    @abc.abstractmethod
    def call(self, *arrays: Any) -> Any:
        """Call the kernel."""

    @abc.abstractmethod
    def expected(self) -> list[np.ndarray]:
        """Compute the results of the call with these arguments by the plain specification."""

    def shapes(self) -> list[tuple[tuple[int, ...], Any]]:
        """Return shape and dtype of each argument."""
        return [(array.shape, array.dtype) for array in self.arguments()]  # type: ignore[union-attr]

    def runs_on(self, capability: Capability) -> bool:
        """Return whether the kernel's machine code for cards of a capability can be executed.

        On 10.0 products of many rows in 16 bits are `tcgen05`, which the interpreter lacks.
        """
        if capability == (10, 0):
            rows = ("decode", "kv_write", "rope_kv_write", "add_norm", "greatest", "state_steps")
            return self.family in (*rows, "latent") or self.dtypes.startswith("f32")
        return capability >= (8, 0)

    def blocks(self, launch: Launch) -> Sequence[int] | None:
        """Return the numbers of the blocks of a launch that run. None means all."""
        return None

    def results(self, run: Any) -> list[np.ndarray]:
        """Take the results to compare with `expected` from a finished run of the program."""
        return run.results()

    def describe(self) -> dict[str, Any]:
        """Describe the case by its type and fields, as JSON holds them."""
        return {"type": type(self).__name__, **dataclasses.asdict(self)}  # type: ignore[call-overload]
