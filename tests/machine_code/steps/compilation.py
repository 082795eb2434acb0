"""Compilation of an engine's programs for a card that is not there."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.gpu.offline_environment import compiler_variables, default_folder, make_environment
from scripts.lib.paths import ROOT
from scripts.machine_code.compiled_program import Program, from_json
from tests.machine_code.case import Capability
from tests.machine_code.cases import CARDS
from tests.machine_code.offline import NotCompiled
from tests.machine_code.steps.programs import Setup

WORKER = "tests.machine_code.steps.compile_worker"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Programs, and the functions that they were traced from, by file."""

    programs: dict[str, Program]
    sources: dict[str, list[str]]


def compile_programs(setup: Setup, capability: Capability, names: Sequence[str]) -> Compiled:
    """Compile programs of a setup in the offline environment, which is made where it is missing.

    Raises:
        NoEnvironment: it is missing and cannot be made.
        NotCompiled: a program cannot be compiled or read. Its process prints the reason.
    """
    interpreter = make_environment(default_folder())
    with tempfile.TemporaryDirectory(prefix="jaxserve-compile-") as work:
        folder = Path(work)
        ended = subprocess.run(
            [
                *(str(interpreter), "-m", WORKER, CARDS[capability], work),
                *(json.dumps(dataclasses.asdict(setup)), *names),
            ],
            cwd=ROOT,
            env=compiler_variables(interpreter.parents[1], folder, whole_constants=True),
            check=False,
        )
        if ended.returncode != 0:
            raise NotCompiled(f"{setup.name} for {CARDS[capability]}: see the lines above")
        programs = {}
        for number, name in enumerate(names):
            data = json.loads((folder / f"program_{number}.json").read_text())
            programs[name] = from_json(data, data["modules"])
        return Compiled(programs, json.loads((folder / "sources.json").read_text()))
