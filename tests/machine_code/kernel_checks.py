"""Checks of a kernel's machine code in every run of the tests, for one capability."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import numpy as np
import pytest

from scripts.machine_code.xla_programs import Executable
from tests.machine_code.case import Capability, Case
from tests.machine_code.cases import CARDS, FAMILIES
from tests.machine_code.execution import execute
from tests.machine_code.kept import kept_file, spell
from tests.machine_code.selection import chosen_cases, kernel_cases

FIRST_CAPABILITIES = ((8, 0), (9, 0))
"""Those that `test_kernels.py` runs; others have a file of their own, and may have a process."""
OTHER_CAPABILITIES = tuple(CARDS.keys() - FIRST_CAPABILITIES)
USUAL: dict[str, Capability] = {
    "decode": (9, 0),
    "ragged": (9, 0),
    "mosaic": (9, 0),
    "kv_write": (8, 9),
    "rope_kv_write": (8, 0),
    "add_norm": (10, 0),
    "greatest": (12, 0),
    "few_rows": (8, 9),
    "grouped": (8, 0),
    "quantized": (12, 0),
    "quantized_grouped": (9, 0),
    "causal_conv": (10, 0),
    "state_chunks": (9, 0),
    "channel_chunks": (9, 0),
    "state_steps": (10, 0),
    "latent": (9, 0),
}
"""Of each kernel the capability whose machine code a run without `--long` executes."""


def each_kernel(
    capabilities: Iterable[Capability], usual: Mapping[str, Capability] | None = None
) -> pytest.MarkDecorator:
    """Return the mark of a test that runs for every kernel and some capabilities.

    Args:
        usual: where it is given, the one capability of each kernel that is no long form.
    """

    def marks(capability: Capability, family: str) -> list[pytest.MarkDecorator]:
        is_long = usual is not None and usual[family] != capability
        return [pytest.mark.long] if is_long else []

    kernels = [
        pytest.param(
            *(capability, family),
            id=f"{spell(capability)}-{family}",
            marks=marks(capability, family),
        )
        for capability in sorted(capabilities)
        for family in FAMILIES
        if kernel_cases(capability, family)
    ]
    return pytest.mark.parametrize(("capability", "family"), kernels)


@functools.cache
def expected(case: Case) -> list[np.ndarray]:
    """Return the specification's results, which hold for every capability."""
    return case.expected()


def check_kernel(capability: Capability, family: str) -> None:
    """Execute the chosen cases, which together execute every instruction that the kernel has."""
    faults, executed = [], set()
    for case in chosen_cases(capability, family):
        executable = Executable.of(kept_file(family).get(case, capability))
        outcome = execute(case, executable, expected=expected(case))
        faults += [f"{case.name}: {fault}" for fault in outcome.faults]
        executed |= outcome.executed
    assert faults == []
    executions = kept_file(family).executions(capability).values()
    held = {name for e in executions for name in (*e.executed, *e.not_executed)}
    assert held and held - executed == set()
