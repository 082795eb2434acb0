"""The choice of cases that every run of the tests executes."""

from __future__ import annotations

from collections.abc import Mapping

from tests.machine_code.case import Capability, Case
from tests.machine_code.cases import all_cases
from tests.machine_code.kept import Execution, kept_file


def kernel_cases(capability: Capability, family: str) -> list[Case]:
    """List all cases of a kernel for a capability."""
    return [case for case in all_cases() if case.family == family and case.runs_on(capability)]


def chosen_cases(capability: Capability, family: str) -> list[Case]:
    """Choose cases of a kernel that together have each of its dtypes and execute all they can.

    The next is always the one that adds most for its cost.
    """
    executions = kept_file(family).executions(capability)
    cases = {c.name: c for c in kernel_cases(capability, family) if c.name in executions}
    chosen = cover(
        {name: _features(case, executions[name]) for name, case in cases.items()},
        {name: executions[name].instructions for name in cases},
    )
    return [cases[name] for name in chosen]


def _features(case: Case, execution: Execution) -> set[str]:
    """Return the dtypes of a case, and the instructions that it executes."""
    return {*case.dtypes.split(), *execution.executed}


def cover(features: Mapping[str, set[str]], costs: Mapping[str, int]) -> list[str]:
    """Return names whose features together are all: cheap ones with many of them first."""
    left, chosen = set().union(*features.values()), []
    while left:
        best = max(features, key=lambda name: len(features[name] & left) / (costs[name] + BASE))
        chosen.append(best)
        left -= features[best]
    # Cases chosen first may have become superfluous.
    for name in sorted(chosen, key=lambda name: -costs[name]):
        others = (features[other] for other in chosen if other != name)
        if features[name] <= set().union(*others):
            chosen.remove(name)
    return chosen


BASE = 4_000_000
"""Instructions that take as long as reading and translating the machine code of a case."""
